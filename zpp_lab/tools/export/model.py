"""From a run's folder to a folder with config.json and safetensors, adapters merged.

The weights are the fp32 masters; `quantized.py` writes what the wires make of them. Adapters are
added to the frozen base that they were trained on, encoded and decoded as its ranks keep it, in
train.param_dtype. So the export has the run's own losses.

A run's adapters alone go into the files that peft writes and loads:

    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [rank, in], lora_B [out, rank]
    adapter_config.json         the settings of peft.LoraConfig

Modules have transformers' names. Adapters loaded on an unquantized base differ from the run's
unless its base was unquantized too: `--to hf` writes both together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.flat import stored_config
from zpp_lab.config.model import LoraConfig
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import GATHERS
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.frozen import Marks, check_marks, decode_shards, encode_shards, mark
from zpp_lab.files import CONFIG, below, missing, read_yaml
from zpp_lab.models import build_model
from zpp_lab.models.llama_hf import hf_name, to_halves, turned
from zpp_lab.models.lora import A, adapters_of, inputs_first, is_adapter, merged
from zpp_lab.models.start import whole
from zpp_lab.runs.checkpoint.read import SavedWeights, newest
from zpp_lab.tools.export.card import adapter_text, plain_text, write_readme
from zpp_lab.tools.export.shards import LIMIT, write_safetensors
from zpp_lab.tools.export.target import Target, target_of, write_tokenizer
from zpp_lab.tools.export.wire import WireWeights

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def merge_adapters(config: Config, saved: SavedWeights) -> tuple[Config, SavedWeights]:
    """Return the run's config without adapters, and weights that hold them."""
    if not config.model.lora.on:
        return config, saved
    plain = replace(config.model, lora=LoraConfig())
    raw: dict[str, Any] = dict.fromkeys(("weights", *GATHERS), CodecConfig())
    rules = [r for r in config.recipe.rules if r.exempt]
    recipe = replace(config.recipe, **raw, rules=rules, phases=[])
    return replace(config, model=plain, recipe=recipe), MergedWeights(config, saved)


class MergedWeights:
    """`SavedWeights` of the model that base and adapters are together.

    ValueError when the weights that the run started from have changed or are gone.
    """

    marks: Marks = {}  # nothing stands on anything

    def __init__(self, config: Config, adapters: SavedWeights) -> None:
        self.config, self.adapters, self.step = config, adapters, adapters.step
        if not adapters.marks:
            raise ValueError(
                "the checkpoint has no frozen base, but the run's config has "
                "adapters; restore either from a copy"
            )
        self.shapes = {n: tuple(m[1:].tolist()) for n, m in adapters.marks.items()}
        vocabulary = self.shapes.get("embed.weight", (0,))[0]
        self.model = build_model(config.model, vocabulary, "meta")
        self.plan = build_plan(self.model, config)
        self.segments = {s.name: s for u in self.plan.units for s in u.stored.segments}
        self.start = self.model.start(config.seed)

    def wired(self) -> MergedWeights | None:
        """Return the same, with the adapters that the gather before forward brings at the
        checkpoint's step; None where they travel as their own bytes."""
        wire = WireWeights(self.config, self.adapters)
        return MergedWeights(self.config, _Wired(wire)) if wire.quantized else None

    def read(self, name: str) -> Tensor:
        """Return a whole weight on the CPU, fp32, its adapters added."""
        base, (a, b) = self._base(name), adapters_of(name)
        if a not in self.adapters.shapes or not name.endswith(".weight"):
            return base
        parts = self.adapters.read(a), self.adapters.read(b)
        return merged(base, *parts, self.config.model.lora.scale, inputs_first(self.model, name))

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of `read`, which takes the whole base to decode them."""
        return self.read(name)[first:last]

    def _base(self, name: str) -> Tensor:
        shape, recipe = self.shapes[name], self.plan.recipe
        value = self.start.rows(name, *whole(shape))
        check_marks({name: mark(value, 0, shape)}, {name: self.adapters.marks[name]})
        payload = encode_shards(self.segments[name], value, recipe.shards)
        out = torch.empty(shape, dtype=recipe.weights_dtype)
        decode_shards(self.segments[name], payload, out)
        return out.float()


class _Wired:
    """`SavedWeights` as the wire brings them."""

    def __init__(self, wire: WireWeights) -> None:
        saved = wire.saved
        self.wire, self.step, self.shapes, self.marks = wire, saved.step, saved.shapes, saved.marks

    def read(self, name: str) -> Tensor:
        return self.wire.decoded(name).float()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.read(name)[first:last]


@dataclass(frozen=True)
class Exported:
    step: int
    tensors: int
    nbytes: int


def export_hf(
    run: Path, out: Path, dtype: str = "fp32", limit: int = LIMIT, license: str | None = None
) -> Exported:
    """Write the newest weights of the run in `run` to the new folder `out`.

    dtype: fp32, bf16 or fp16; limit: bytes of one file. The folder appears when it is whole.
    Adapters are added to their frozen base. license: for the card; None: the base's.
    ValueError when there is no run or checkpoint, or `out` is there already.
    """
    with new_folder(out) as folder:
        config, saved = open_run(run)
        target = target_of(config, saved)
        read = _readers(target, saved)
        shapes = {target.names[n]: shape for n, shape in saved.shapes.items()}
        shapes |= {n: tuple(b.shape) for n, b in target.buffers.items()}
        nbytes = write_safetensors(folder, shapes, lambda n: read[n](), EXPORT_DTYPES[dtype], limit)
        write_config(folder, target.config, dtype)
        write_tokenizer(run, config.data, folder)
        text = plain_text(config, saved.step, dtype, isinstance(saved, MergedWeights))
        write_readme(folder, config, text, license)
    return Exported(saved.step, len(shapes), nbytes)


def open_run(run: Path) -> tuple[Config, SavedWeights]:
    """Return settings and newest whole weights of a run, adapters added to their base."""
    return merge_adapters(run_config(run), newest(run, kinds=("weights.", "kept.")))


def run_config(run: Path) -> Config:
    """Raise ValueError when `run` is no run's folder."""
    if not run.is_dir():
        raise ValueError(
            f"{run} is not a run's folder: {missing(run)}; use one such as RUNS/ARM/seed1"
        )
    if not (run / CONFIG).is_file():
        raise ValueError(
            f"{run} is not a run's folder: it has no {CONFIG}{_runs_near(run)}; use one such as "
            "RUNS/ARM/seed1"
        )
    values = read_yaml(run / CONFIG)
    try:
        return stored_config(values)
    except ValueError as error:
        raise ValueError(
            f"{run / CONFIG}: {error}; read it with the version of zpp_lab that wrote it"
        ) from None


def _runs_near(folder: Path) -> str:
    if (folder.parent / CONFIG).is_file():  # its checkpoints were named
        return f" (did you mean {folder.parent}?)"
    return below(folder, CONFIG) or below(folder, f"*/{CONFIG}")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` when all went well, and else disappears."""
    if out.exists():
        raise ValueError(f"{out} exists already: use a new folder, or delete it")
    partial_folder = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        yield partial_folder
        partial_folder.rename(out)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def write_config(folder: Path, config: dict[str, Any], dtype: str) -> None:
    text = json.dumps(
        {**config, "dtype": str(EXPORT_DTYPES[dtype]).removeprefix("torch.")},
        indent=2,
        sort_keys=True,
    )
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _readers(target: Target, saved: SavedWeights) -> dict[str, Callable[[], Tensor]]:
    def read(name: str) -> Tensor:
        return target.arrange(name, saved.read(name))

    own = {target.names[n]: partial(read, n) for n in saved.shapes}
    return {**own, **{n: partial(itself, b) for n, b in target.buffers.items()}}


def itself(value: Tensor) -> Tensor:
    return value


WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def export_peft(run: Path, out: Path, license: str | None = None) -> Exported:
    """Write the newest adapters of the run in `run` to the new folder `out`, in fp32.

    ValueError when there is no run or checkpoint, no adapters, or `out` is there already.
    """
    with new_folder(out) as folder:
        config = run_config(run)
        if not config.model.lora.on:
            raise ValueError(f"{run} has no adapters (model.lora.rank=0): use --to hf")
        saved = newest(run)
        names = {}
        for name in filter(is_adapter, saved.shapes):
            module, _, which = name.rpartition(".")
            theirs = f"base_model.model.{_their_module(config, module)}"
            names[f"{theirs}.{which}.weight"] = name
        shapes = {theirs: saved.shapes[n] for theirs, n in names.items()}
        nbytes = write_safetensors(
            folder, shapes, _reader(config, saved, names), torch.float32, limit=2**62
        )
        (folder / "model.safetensors").rename(folder / WEIGHTS)
        text = json.dumps(_settings(config, saved, sorted(names)), indent=2, sort_keys=True)
        (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")
        write_readme(folder, config, adapter_text(config, saved.step), license, library="peft")
    return Exported(saved.step, len(names), nbytes)


def _their_module(config: Config, module: str) -> str:
    if config.model.name == "hf":
        return module
    return hf_name(f"{module}.weight").removesuffix(".weight")


def _reader(config: Config, saved: SavedWeights, names: dict[str, str]) -> Callable[[str], Tensor]:
    """B's rows are the layer's own, in the order that the folder's model wants."""
    ours = config.model.name == "llama"

    def read(theirs: str) -> Tensor:
        module, _, which = names[theirs].rpartition(".")
        value = saved.read(names[theirs])
        rows_move = ours and which != A and turned(f"{module}.weight")
        return to_halves(value, config.model.dim // config.model.heads) if rows_move else value

    return read


def _settings(config: Config, saved: SavedWeights, names: list[str]) -> dict[str, Any]:
    """The fields of peft.LoraConfig that say how to load; the others have their defaults."""
    lora = config.model.lora
    vocabulary = int(saved.marks["embed.weight"][1]) if "embed.weight" in saved.marks else 0
    model = build_model(config.model, vocabulary, "meta")
    adapted = [n for n, m in model.named_modules() if hasattr(m, A)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(inputs_first(model, f"{n}.weight") for n in adapted),
        "target_modules": _targets(config, model, adapted),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _targets(config: Config, model: nn.Module, adapted: list[str]) -> list[str]:
    """The layers' last names where these name no others, else their whole names."""
    short = {_last(_their_module(config, n)) for n in adapted}
    others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in adapted]
    clash = any(_last(_their_module(config, n)) in short for n in others)
    return sorted({_their_module(config, n) for n in adapted} if clash else short)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
