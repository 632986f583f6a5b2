"""Hugging Face's Trainer and accelerate around sharded models, run on both ranks of a world."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from tests.loop_base import RECIPES
from zpp_lab.api import shard

WORLD, BATCH, LENGTH, RATE = 2, 2, 12, 1e-2


def rows(n: int, classes: bool = False) -> list[dict[str, Tensor]]:
    """Records in which other numbers of tokens count; `classes`: each has one label."""
    made = torch.Generator().manual_seed(1)
    found = []
    for i in range(n):
        inputs = torch.randint(64, (LENGTH,), generator=made)
        labels = inputs.clone()
        labels[: i % 7] = -100
        found.append({"input_ids": inputs, "labels": inputs[0] % 2 if classes else labels})
    return found


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, **heads))


def gpt2(dropout: float = 0.0) -> Any:
    """Tied weights, Conv1D, dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape, **drops, use_cache=False))


def t5() -> Any:
    """An encoder, which `generate` calls alone."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=64, **shape, dropout_rate=0.0, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def bert() -> Any:
    """A classifier, which cannot generate."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, num_attention_heads=2, **shape, **drops)
    )


class Net(nn.Module):
    """A module that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in "ab")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "bert": bert,
    "net": Net,
}


def new(kind: str, name: str = "", seed: int = 0, **more: Any) -> tuple[Any, Any]:
    """A model, and what sharded it; without a recipe's name as it is."""
    torch.manual_seed(seed)
    model = MODELS[kind](**more)
    return model, shard(model, RECIPES[name], "2x1", steps=20) if name else None


def trainer(model: Any, folder: str = "out", kind: str = "Trainer", **more: Any) -> Any:
    """A Trainer of 4 steps; `more`: its arguments, and others of TrainingArguments."""
    import transformers
    from accelerate.state import AcceleratorState
    from transformers.trainer_callback import PrinterCallback

    AcceleratorState._reset_state()
    args: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    classes = more.pop("classes", False)
    own = {k: more.pop(k) for k in ("compute_metrics", "model_init") if k in more}
    made = getattr(transformers, kind)(
        model,
        getattr(transformers, kind.replace("er", "ingArguments"))(folder, **args | more),
        train_dataset=rows(40, classes),
        eval_dataset=rows(5, classes),
        **own,
    )
    made.remove_callback(PrinterCallback)
    return made


def sync_each_batch(each: bool = True) -> dict[str, Any]:
    """Fresh every time: Trainer writes into it."""
    return {"gradient_accumulation_kwargs": {"sync_each_batch": each}}


def logged(made: Any, key: str = "loss") -> list[float]:
    return [line[key] for line in made.state.log_history if key in line]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole masters."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


# ---------------------------------------------------------------------- losses

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing_factor": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "each its mean": {"average_tokens_across_devices": False},
    "checkpointed": {"gradient_checkpointing": True},
    "noisy": {"neftune_noise_alpha": 5.0},
}


def losses(kind: str, case: str, **other: Any) -> dict[str, Any]:
    """Losses, held-out losses and norms: under DDP, and of a sharded model."""
    found = {}
    for name in ("", "zero3"):
        model, _ = new(kind, name)
        more = (
            CASES[case] | other | {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}
        )
        if more.pop("each", False):
            more["accelerator_config"] = sync_each_batch()
        more["classes"] = kind == "bert"
        # at larger rates AdamW amplifies rounding within a few steps
        made = trainer(model, max_steps=10, learning_rate=2e-3, **more)
        made.train()
        losses = logged(made) + logged(made, "eval_loss")
        found[name or "ddp"] = [losses, logged(made, "grad_norm")]
    return found


# ---------------------------------------------------------------------- bits


def parts(step: int, accumulate: int) -> list[list[dict[str, Tensor]]]:
    """The records of a step's micro-batches, of all ranks."""
    data, size = rows(40), WORLD * BATCH
    starts = [(step * accumulate + micro) * size % len(data) for micro in range(accumulate)]
    return [data[start : start + size] for start in starts]


def own_part(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    own = some[dist.get_rank() * BATCH :][:BATCH]
    return {k: torch.stack([row[k] for row in own]) for k in own[0]}


def own_loop(model: Any, accumulate: int, each: bool) -> list[float]:
    """The loop that Trainer's settings stand for; `each`: reduce every micro-batch's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    found = []
    first = int(model.loss_type is not None)  # Trainer counts a label more where it knows no loss
    for step in range(4):
        given, total = parts(step, accumulate), torch.zeros(())
        counted = sum(int((r["labels"][first:] != -100).sum()) for some in given for r in some)
        for i, some in enumerate(given):
            if not each:
                model.set_requires_gradient_sync(i == accumulate - 1)
            loss = model(**own_part(some), num_items_in_batch=torch.tensor(counted)).loss * WORLD
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        found.append(total.item() / WORLD)
    return found


def bits(name: str, kind: str, each: bool) -> list[Any]:
    """Losses, steps and equality of weights, by Trainer and by the loop that it stands for."""
    found = []
    for accumulate in (1, 2):
        model, sharded = new(kind, name)
        made = trainer(
            model,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=0.1,
            accelerator_config=sync_each_batch(each),
        )
        made.train()
        ends = [weights(model)]
        trained, steps = logged(made), sharded.state_dict()["step"]
        model, sharded = new(kind, name)
        found.append([trained, own_loop(model, accumulate, each)])
        ends.append(weights(model))
        assert same(*ends), f"{name}, {accumulate} micro-steps"
        found.append([steps, sharded.state_dict()["step"]])
    return found


def by_accelerate(model: Any, ddp: bool) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model = accelerator.prepare_model(model, evaluation_mode=not ddp)
    optimizer = accelerator.prepare(optimizer)
    found = []
    for step in range(4):
        for some in parts(step, 2):
            with accelerator.accumulate(model):
                loss = model(**own_part(some)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()[None]).mean().item())
    return found


def accelerated(name: str) -> dict[str, Any]:
    """accelerate's loop with DDP and with a recipe, and the loop that it stands for."""
    found = {"ddp": by_accelerate(new("llama")[0], True)}
    model, _ = new("llama", name)
    found["accelerate"] = by_accelerate(model, False)
    ends = [weights(model)]
    model, _ = new("llama", name)
    optimizer, own = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for step in range(4):
        for some in parts(step, 2):
            loss = model(**own_part(some)).loss
            (loss / 2).backward()
            every = [torch.zeros(()) for _ in range(WORLD)]
            dist.all_gather(every, loss.detach())
            own.append(torch.stack(every).mean().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert same(*ends, weights(model))
    return found | {"own": own, "loose": 1e-5 if name == "zero3" else 0.05}


def scaled(name: str) -> dict[str, list[float]]:
    """Losses and scales in fp16, by DDP and sharded; in one step one rank's gradients overflow."""
    found = {}
    for kind in ("", name):
        model: Any = new("llama", kind)[0]
        if not kind:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        scaler, said = torch.amp.GradScaler("cpu", init_scale=2.0**14), []
        for step in range(5):
            with torch.autocast("cpu", torch.float16):
                loss = model(**own_part(parts(step, 1)[0])).loss
            scaler.scale(loss * (1e9 if step == 2 and dist.get_rank() else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            said += [loss.item(), scaler.get_scale()]
        found[kind or "ddp"] = said
    return found


# ---------------------------------------------------------------------- checkpoints


def resumable(made: Any, sharded: Any) -> Any:
    """With GUIDE.md's callback."""
    from transformers import TrainerCallback

    from tests.test_loops import guide

    names = {"TrainerCallback": TrainerCallback, "dcp": dcp, "trainer": made, "sharded": sharded}
    exec(guide(3), names | vars(dcp_state))
    return made


def saved(name: str, kind: str) -> dict[str, Any]:
    """Weights that Trainer's checkpoints and `save_model` hold, the best ones that it loads at the
    end, and the losses after a resume."""
    from transformers import AutoModelForCausalLM

    path = Path(f"{kind}-{name}")
    more = {
        "max_steps": 6,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    dropout = {"dropout": 0.2} if kind == "gpt2" else {}
    model, sharded = new(kind, name, **dropout)
    made = resumable(trainer(model, str(path), **more), sharded)
    made.train()
    made.save_model(str(path / "end"))
    best = made.state.best_model_checkpoint
    found: dict[str, Any] = {"best": Path(best).name, "step": sharded.state_dict()["step"]}
    found["on"] = logged(made), logged(made, "eval_loss")
    found["class"] = []
    for at in (best, path / "end"):
        read = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
        assert same(weights(read), weights(model)), at
        found["class"].append(type(read).__name__)
    model, sharded = new(kind, name, seed=7, **dropout)
    made = resumable(trainer(model, str(path), **more), sharded)
    made.train(resume_from_checkpoint=str(path / "checkpoint-4"))
    found["resumed"] = logged(made), logged(made, "eval_loss")
    return found


# ---------------------------------------------------------------------- evaluation


def generated(name: str) -> dict[str, Any]:
    """Losses and generated tokens: without sharding, sharded, and without any evaluation."""
    found: dict[str, Any] = {}
    for case, kind, strategy in (
        ("ddp", "", "steps"),
        ("sharded", name, "steps"),
        ("quiet", name, "no"),
    ):
        model, _ = new("t5", kind)
        tokens: list[Any] = []

        def metrics(given: Any, tokens: list[Any] = tokens) -> dict[str, float]:
            tokens.append(given.predictions.tolist())
            return {}

        made = trainer(
            model,
            kind="Seq2SeqTrainer",
            predict_with_generate=True,
            generation_max_length=8,
            eval_strategy=strategy,
            eval_steps=2,
            eval_on_start=strategy == "steps",
            compute_metrics=metrics,
        )
        made.train()
        inputs = own_part(parts(0, 1)[0])["input_ids"]
        with torch.no_grad():  # ranks end after other numbers of tokens
            more = model.generate(inputs, max_new_tokens=3 if dist.get_rank() else 9)
        found[case] = [logged(made), tokens, more.tolist()]
    return found | {"exact": name == "zero3"}


# ---------------------------------------------------------------------- settings


def refusals(deepspeed: bool) -> dict[str, list[str]]:
    """The kind and text of the error, by setting."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    found: dict[str, list[str]] = {}
    stage = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": BATCH}
    settings: dict[str, dict[str, Any]] = {
        "fsdp": {"fsdp": "full_shard"},
        "parallelism_config": {},
        "save_only_model": {"save_strategy": "steps", "save_steps": 1},
    }
    for setting, more in (
        {"deepspeed": {"deepspeed": stage}}.items() if deepspeed else settings.items()
    ):
        model, _ = new("llama", "zero3")
        try:
            made = trainer(model, **more)
            if not more:  # accelerate takes one on GPUs alone
                AcceleratorState._shared_state["parallelism_config"] = ParallelismConfig()
            made.train()
            found[setting] = ["", ""]
        except ValueError as error:
            found[setting] = [type(error).__name__, str(error)]
        for name in [n for n in os.environ if n.startswith("ACCELERATE_USE")]:
            del os.environ[name]
    return found


def compiled(name: str) -> list[Any]:
    """Losses with `torch_compile`, and without it."""
    found: list[Any] = []
    for more in ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {}):
        made = trainer(new("llama", name)[0], **more)
        made.train()
        found.append(logged(made))
        wrapped = type(made.model_wrapped).__name__
        assert (wrapped == "OptimizedModule") == bool(more), wrapped
    return found


def from_model_init(name: str) -> list[list[float]]:
    """Losses of a model that is sharded in `model_init`, and before."""
    found = []
    for own in ({"model_init": lambda: new("llama", name)[0]}, {}):
        made = trainer(None if own else new("llama", name)[0], **own)
        made.train()
        found.append(logged(made))
    return found


def adapted(name: str) -> list[list[float]]:
    """Losses of peft's adapters under DDP and sharded; those that were saved are the masters."""
    import peft
    from safetensors.torch import load_file

    found = []
    for kind in ("", name):
        torch.manual_seed(0)
        chosen = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(llama(), chosen)
        if kind:
            shard(model, RECIPES[kind], "2x1")
        made = trainer(model, label_smoothing_factor=0.1, gradient_accumulation_steps=2)
        made.train()
        found.append(logged(made))
    whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dcp_state.get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained("adapters", state_dict=state)
    dist.barrier()
    read = load_file("adapters/adapter_model.safetensors")
    masters = weights(model)
    own = {n.replace(".default", ""): t for n, t in masters.items() if "lora" in n}
    assert same(read, own)
    return found


FAST: dict[str, Callable[[], Any]] = {
    "losses gpt2 accumulated": lambda: losses("gpt2", "accumulated"),
    "bits loco llama": lambda: bits("loco", "llama", False),
    "bits zeropp gpt2 each": lambda: bits("zeropp", "gpt2", True),
    "accelerated zero3": lambda: accelerated("zero3"),
    "scaled zero3": lambda: scaled("zero3"),
    "saved sdp4bit gpt2": lambda: saved("sdp4bit", "gpt2"),
    "generated zero3": lambda: generated("zero3"),
    "refusals": lambda: refusals(False),
}
SLOW: dict[str, Callable[[], Any]] = {
    **{f"losses llama {case}": partial(losses, "llama", case) for case in CASES},
    "losses bert": lambda: losses("bert", "smoothed", gradient_accumulation_steps=2),
    "accelerated loco": lambda: accelerated("loco"),
    "losses net": lambda: losses("net", "accumulated", each=True),
    "autocast": lambda: losses("llama", "plain", bf16=True),
    "losses gpt2 smoothed": lambda: losses("gpt2", "smoothed"),
    "bits zero3 llama": lambda: bits("zero3", "llama", False),
    "bits zeropp llama": lambda: bits("zeropp", "llama", False),
    "bits sdp4bit gpt2": lambda: bits("sdp4bit", "gpt2", False),
    "bits loco llama each": lambda: bits("loco", "llama", True),
    "bits sdp4bit t5 each": lambda: bits("sdp4bit", "t5", True),
    "saved zeropp llama": lambda: saved("zeropp", "llama"),
    "saved loco gpt2": lambda: saved("loco", "gpt2"),
    "generated zeropp": lambda: generated("zeropp"),
    "generated sdp4bit": lambda: generated("sdp4bit"),
    "same compiled zeropp": lambda: compiled("zeropp"),
    "same from_model_init sdp4bit": lambda: from_model_init("sdp4bit"),
    "same adapted zero3": lambda: adapted("zero3"),
    "refusals deepspeed": lambda: refusals(True),
}


def jobs(folder: str, fast: bool) -> dict[str, Any]:
    """One start of ranks serves all tests."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")
    os.chdir(folder)
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        return {name: job() for name, job in (FAST if fast else SLOW).items()}
