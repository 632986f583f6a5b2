"""Loss curves of `experiment=finetune_13b_1gpu` on one GPU and on two, and an order control.

    python experiments/beyond/finetune.py OUT [--steps 12] [--until UNIX_TIME] [--tiny]

Makes a LlamaForCausalLM folder of 13B's shape with random weights (26 GB, in OUT/work; a folder in
memory is fastest) and records from Python's standard library. Then it trains --steps steps from the
same weights and records, eight sequences each: `one` on one GPU with state in host memory,
`reordered` the same in two micro-batches, `two` on two GPUs, or as two nodes that share one, and
`device` on one GPU with all state. OUT/finetune.json has the curves and how far each is from `one`.
--tiny rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

HOST = "engine.place={gradients: 27, moments: 19}"  # as `auto` places 13B
RUNS = {  # by name: settings of a run
    "one": ["train.batch_size=8", HOST],
    "reordered": ["train.batch_size=4", "train.micro_steps=2", HOST],
    "two": ["train.batch_size=4", HOST],
    "device": ["train.batch_size=8", "engine.place=device"],
}
TWO = ["cluster.gpus_per_node=2"]
SHARED = ["cluster.nodes=2", "engine.share_gpus=mps"]  # two ranks on one GPU
SIZES = {"dim": 5120, "layers": 40, "heads": 40, "ffn": 13824}
TINY = {"dim": 128, "layers": 2, "heads": 4, "ffn": 352}
VOCAB = 32_000


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Write a transformers folder: random weights in bf16 and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=sizes["dim"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        LlamaForCausalLM(config).save_pretrained(folder)
    torch.cuda.empty_cache()  # the runs need it
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)


def make_records(file: Path, count: int) -> None:
    """Write prompts and completions: pieces of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = (s for p in sources for s in p.read_text(errors="ignore").splitlines() if s.strip())
    pieces = zip(*[lines] * 24, strict=False)
    with file.open("w") as out:
        for _, piece in zip(range(count), pieces, strict=False):
            record = {"prompt": "\n".join(piece[:4]), "completion": "\n".join(piece[4:])}
            out.write(json.dumps(record) + "\n")


def curve(name: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train one run → losses and gradient norms, those of its steps until `args.until`."""
    work, folder = args.out / "work", args.out / "work" / name
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        *("experiment=finetune_13b_1gpu", f"model.path={work}/model"),
        *(f"data.path={work}/records.jsonl", f"data.cache_dir={work}/cache"),
        *("data.records.too_long=truncate", f"run.dir={folder}", "train.micro_steps=1"),
        *(f"train.steps={args.steps}", "train.warmup_steps=3", f"train.eval_every={args.steps}"),
        *("train.checkpoint_every=0", "train.keep_checkpoints=0", "train.eval_tokens=16384"),
        *("tracking.wandb=off", *RUNS[name]),
    ]
    if name == "two":
        overrides += SHARED if torch.cuda.device_count() == 1 else TWO
    if args.tiny:
        shape = {**TINY, "kv_heads": TINY["heads"], "vocab_size": VOCAB}
        overrides += [f"model.{key}={value}" for key, value in shape.items()]
        overrides += ["engine.device=cpu", "data.seq_len=64"]
        place = "engine.place={gradients: 1, moments: 1}"
        overrides = [place if word == HOST else word for word in overrides]
    log, metrics = (args.out / f"{name}.log").open("w"), folder / "metrics.jsonl"
    words = [sys.executable, "-m", "zpp_lab.cli", "train", *overrides]
    run = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        run.wait(max(1.0, args.until - time.time()) if args.until < float("inf") else None)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    text = metrics.read_text() if metrics.exists() else ""
    whole = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    kept = ("step", "loss", "grad_norm", "seconds", "heldout_loss")
    return [{key: row[key] for key in kept if key in row} for row in whole if "loss" in row]


def compared(curves: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """How far each curve is from `one`: steps compared, equal ones, largest gap in nats."""
    found = {}
    for name, rows in curves.items():
        pairs = list(zip(rows, curves["one"], strict=False))
        same = sum(a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] for a, b in pairs)
        gap = max((abs(a["loss"] - b["loss"]) for a, b in pairs), default=None)
        found[name] = {"steps": len(pairs), "equal": same, "largest_gap": gap}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--until", type=float, default=float("inf"), help="ends all runs")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out = args.out.absolute()
    work = args.out / "work"
    began = time.time()
    make_model(work / "model", TINY if args.tiny else SIZES)
    make_records(work / "records.jsonl", 2_000)
    print(f"model and records: {time.time() - began:.0f} s", flush=True)
    curves: dict[str, list[dict[str, float]]] = {"one": []}
    for name in args.runs.split(","):
        began = time.time()
        curves[name] = curve(name, args)
        found = {"curves": curves, "against_one": compared(curves)}
        (args.out / "finetune.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.time() - began:.0f} s, {found['against_one'][name]}", flush=True)


if __name__ == "__main__":
    main()
