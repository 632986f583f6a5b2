"""The cards of exported folders: README.md for people, and for quantized weights zpp_lab.json.

A card names the base that training started from and its licence. It says how to load the folder so
that its numbers are those of training: transformers unpacks a weight in the dtype of its scales,
which a `dtype=` changes first, while training in bf16 decodes in fp32 and rounds the result.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.flat import stored_config
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import UPDATE
from zpp_lab.files import CONFIG, read_yaml
from zpp_lab.tools.export.packed import Grid
from zpp_lab.tools.export.wire import codec_text

_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LOAD = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER)
```"""
_LOAD_IN = """```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={name})
```"""
_AT_ONCE = """```python
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

at_once = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={name}, quantization_config=at_once)
```"""
_AFTERWARDS = """```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER)
with torch.no_grad():
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64))  # unpacks the weights
for p in model.parameters():  # model.to({name}) would round the rotary frequencies too
    if p.is_floating_point():
        p.data = p.data.to({name})
```"""
_NEEDS = "This needs `pip install compressed-tensors`"
_UNPACKED = (
    f"{_NEEDS}; the weights are unpacked by the first forward. Give no other `dtype`: they would "
    "be unpacked in it, to other numbers."
)
_SCALES = (
    f"{_NEEDS}. The model was trained in {{kind}}, each weight rounded to it after decoding, and "
    "the scales are in fp32. Without a `dtype` the weights stay unrounded; `dtype={name}` alone "
    "rounds the scales in place of the weights. Both give other weights than training had."
)
_MANY = "`dequantize=True` takes one kind of group for all and fails."
_ARITHMETIC = (
    "In {kind}, transformers rounds inside norms and rotary positions where the trainer does not: "
    "with the very same weights its loss was off by 2e-5 to 4e-4 nats in models of 0.4M "
    "parameters. `zpp-lab evaluate RUN FOLDER --dtype fp32` leaves that out."
)
_RANDOM = "Training began with random weights."
_GONE = "The run that it began from is gone; its base is not known."
_UNKNOWN = "No licence is known: `zpp-lab export --license NAME` states one."
_TERMS = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)", re.IGNORECASE)
RECORD = "zpp_lab.json"


def instructions(dtype: str, computed_in: str, grids: int, built_in: bool) -> str:
    """Return Markdown. dtype: the folder's; computed_in: the run's; grids: how many kinds of packed
    weights; built_in: whether another implementation than transformers' trained the model."""
    kind = rounded_to(dtype, computed_in)
    of = {"kind": kind, "name": f"torch.{_NAMES[kind]}"}
    if not grids:
        lines = [_LOAD if kind == dtype else _LOAD_IN.format(**of)]
    elif kind == dtype:
        lines = [_LOAD, _UNPACKED]
    else:
        lines = [(_AT_ONCE if grids == 1 else _AFTERWARDS).format(**of), _SCALES.format(**of)]
    lines += [_MANY] if grids > 1 else []
    lines += [_ARITHMETIC.format(**of)] if built_in and kind != "fp32" else []
    return "\n\n".join(lines)


def rounded_to(dtype: str, computed_in: str) -> str:
    """Return what the weights of a folder in `dtype` are to be rounded to once they are unpacked:
    what the model was trained in, unless the folder's own dtype has rounded them already."""
    return computed_in if dtype == "fp32" else dtype


@dataclass(frozen=True)
class Card:
    """Facts of one folder; names of tensors are the folder's."""

    config: Config
    step: int
    codec: CodecConfig | None  # of rounding after training; None: as the wire brings them
    dtype: str
    grids: list[Grid]
    packed: list[str]
    requantized: list[str]
    decoded: list[str]
    stochastic: bool

    @property
    def exact(self) -> bool:
        """Whether every number is one that the model computed with in training."""
        return self.codec is None and not self.requantized and self._keeps_the_rest

    @property
    def _keeps_the_rest(self) -> bool:
        return self.dtype == "fp32" or self.dtype == self.config.train.param_dtype

    def record(self) -> dict[str, Any]:
        recipe = self.config.recipe.name
        return {
            "run": {"recipe": recipe, "seed": self.config.seed, "step": self.step},
            "weights": "wire" if self.codec is None else "nearest",
            "codec": None if self.codec is None else codec_text(self.codec),
            "exact": self.exact,
            "dtype": self.dtype,
            "computed_in": self.config.train.param_dtype,
            "groups": [grid.scheme([])["weights"] for grid in self.grids],
            "packed": self.packed,
            "requantized": self.requantized,
            "decoded": self.decoded,
            "versions": dict(_versions()),
        }

    def text(self) -> str:
        model, train = self.config.model, self.config.train
        llama = model.name == "llama"
        loading = instructions(self.dtype, train.param_dtype, len(self.grids), llama)
        return "\n\n".join([self._origin(), self._storage(), *self._changes(), loading])

    def _origin(self) -> str:
        of = f"recipe `{self.config.recipe.name}`, seed {self.config.seed}, step {self.step}"
        if self.codec is not None:
            return (
                f"# Weights rounded after training\n\nThe master weights of {of}, rounded to "
                f"nearest with `{codec_text(self.codec)}`."
            )
        drawn = " Its rounding is random; this is the draw of that step's evaluation."
        return (
            f"# Weights as training used them\n\nThe weights of {of}, as the all-gather before "
            f"the forward brings them to a rank.{drawn if self.stochastic else ''}"
        )

    def _storage(self) -> str:
        kinds = ", ".join(
            f"{g.bits} bits{'' if g.symmetric else ' with zero points'} in groups of {g.group}"
            for g in self.grids
        )
        packed = len(self.packed) + len(self.requantized)
        decoded = f"stored as decoded, in {self.dtype}: {', '.join(self.decoded) or 'none'}"
        recipe, updated = self.config.recipe, ""
        if self.codec is None and recipe.kept and not recipe.wire(UPDATE).raw:
            updated = f" All others are those that nodes keep, as `{UPDATE}` brought them."
        if not self.grids:
            return f"Quantized weights {decoded}.{updated}"
        return f"Packed weights: {packed} ({kinds}). Quantized weights {decoded}.{updated}"

    def _changes(self) -> list[str]:
        found = []
        if self.requantized:
            found.append(
                "**Not the numbers of training.** The format cannot hold the codec of "
                f"{len(self.requantized)} weights ({self.requantized[0]}, ...): their master "
                "weights were rounded to nearest on its own grid with as many bits."
            )
        if not self._keeps_the_rest:
            found.append(
                f"**Rounded to {self.dtype}**, each weight as it is unpacked and all that is not "
                f"packed; the model was trained in {self.config.train.param_dtype}."
            )
        return found


def _versions() -> Iterator[tuple[str, str]]:
    for package in ("zpp_lab", "torch", "transformers", "compressed-tensors"):
        with suppress(PackageNotFoundError):
            yield package, version(package)


def write_card(folder: Path, card: Card, license: str | None = None) -> None:
    (folder / RECORD).write_text(json.dumps(card.record(), indent=1) + "\n", encoding="utf-8")
    write_readme(folder, card.config, card.text(), license)


def plain_text(config: Config, step: int, dtype: str, merged: bool) -> str:
    """Describe weights as the optimizer has them."""
    of = f"recipe `{config.recipe.name}`, seed {config.seed}, step {step}"
    added = " The adapters are added to the frozen base that they were trained on." * merged
    model = config.model
    text = instructions(dtype, config.train.param_dtype, 0, model.name == "llama")
    return f"# Trained weights\n\nThe master weights of {of}, in {dtype}.{added}\n\n{text}"


def adapter_text(config: Config, step: int) -> str:
    lora, of = config.model.lora, f"recipe `{config.recipe.name}`, seed {config.seed}, step {step}"
    return (
        f"# Adapters\n\nLow-rank adapters of {of}: rank {lora.rank}, alpha {lora.alpha:g}.\n\n"
        "```python\nfrom peft import PeftModel\n\nmodel = PeftModel.from_pretrained(BASE, FOLDER)\n"
        "```\n\nBASE is the model, loaded from the base."
    )


def write_readme(
    folder: Path, config: Config, text: str, license: str | None, library: str = "transformers"
) -> None:
    """Write README.md with the Hub's metadata. license: None takes the base's own."""
    base, began = base_of(config)
    own = license or (base and _license(base)) or "unknown"
    facts = {"library_name": library, "license": own}
    facts |= {"base_model": _name(base)} if base else {}
    line = f"{began} Licence: {own}." if own != "unknown" else f"{began} {_UNKNOWN}"
    front = yaml.safe_dump(facts, sort_keys=False)
    if config.model.scalar_head:
        text = text.replace("ForCausalLM", "ForSequenceClassification")
    (folder / "README.md").write_text(f"---\n{front}---\n\n{text}\n\n{line}\n", encoding="utf-8")
    for path in [p for p in base.glob("*") if p.is_file() and _TERMS.match(p.name)] if base else []:
        shutil.copy(path, folder / path.name)


def base_of(config: Config) -> tuple[Path | None, str]:
    """Return the folder of the pretrained weights that training began with, through the runs that
    it went on from, and what a card says of it; None of random weights, or where such a run is
    gone."""
    model = config.model
    if model.start is None:
        if model.weights != "pretrained" or not model.path:
            return None, _RANDOM
        base = Path(model.path).expanduser()
        return base, f"Training began with the weights of {_name(base)}."
    start = Path(model.start).expanduser()
    run = next((p for p in (start, *start.parents) if (p / CONFIG).is_file()), None)
    return base_of(stored_config(read_yaml(run / CONFIG))) if run else (None, _GONE)


def _name(base: Path) -> str:
    """OWNER/NAME of a folder in the Hub's cache, else the folder's own name."""
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{base.resolve()}/")
    return "/".join(cached.groups()) if cached else base.resolve().name


def _license(base: Path) -> str | None:
    """What the base's own card says."""
    try:
        found = re.match(r"---\n(.*?)^---$", (base / "README.md").read_text("utf-8"), re.M | re.S)
        stored = yaml.safe_load(found[1]) if found else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    own = stored.get("license") if isinstance(stored, dict) else None
    return own if isinstance(own, str) else None
