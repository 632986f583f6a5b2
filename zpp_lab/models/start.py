"""Where a model's weights come from at the start, a parameter's rows at a time.

A sharded engine fills its own rows only, so nothing here builds a whole model: `Start.rows`
gives any rows of any parameter, and `materialize` makes room for them. Rows come

- from a seed: `SeededStart`;
- from a folder's safetensors, one file or several with an index: `WeightFiles`, which every rank
  opens to read its own rows (`hf_start.py`, `llama_hf.py`);
- from a run of ours (`model.start`): `RunStart`, whichever engine and cluster wrote it. It takes
  weights and no optimizer; each rank reads the parts of files that hold its rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models.init import initial_rows, initial_value
from zpp_lab.runs.checkpoint.index import DamagedError
from zpp_lab.runs.checkpoint.read import Ranks, open_saved
from zpp_lab.runs.checkpoint.tensor_file import Place, read_layout, read_rows

INDEX = "model.safetensors.index.json"
SCORE = "score.weight"  # of a scalar head
Shapes = Mapping[str, Sequence[int]]
Rows = Callable[[tuple[int, ...]], tuple[int, int]]  # whole shape → first row, last row + 1


class WeightFiles:
    """The tensors of `folder`; `files` maps each one's name to its file. ValueError when there is
    no such folder, no .safetensors in it, a file that is cut short, or an index that names files or
    tensors that are not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _listed(folder)
        self.layouts: dict[Path, dict[str, Place]] = {}

    def shape(self, name: str) -> list[int]:
        return list(self._place(name).shape)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Read rows [first, last) of a tensor, fp32; no others are read."""
        return read_rows(self.files[name], self._place(name), first, last).float()

    def whole(self, name: str) -> Tensor:
        """Read a tensor as it was saved."""
        place = self._place(name)
        return read_rows(self.files[name], place, 0, place.shape[0] if place.shape else 1)

    def check(self, wanted: Shapes, found: Shapes) -> None:
        """ValueError that lists how the folder's tensors `found` differ from those `wanted`."""
        if faults := differences(wanted, found):
            raise ValueError(f"{self.folder}: {faults}")

    def _place(self, name: str) -> Place:
        path = self.files[name]
        if path not in self.layouts:
            self.layouts[path] = _opened(path)
        return self.layouts[path][name]


def drop_heads(wanted: dict[str, Any], found: dict[str, Any], head: str) -> bool:
    """Where a scalar head is `wanted` that `found` lacks, drop it from the one and the vocabulary's
    `head` from the other; return whether."""
    lacks = SCORE in wanted and SCORE not in found
    if lacks:
        del wanted[SCORE]
        found.pop(head, None)
    return lacks


def differences(wanted: Shapes, found: Shapes) -> str:
    """List the names of `found` that are missing, left over or of another shape; "" for none."""
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not in the model": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{n} {list(found[n])}, not {list(wanted[n])}"
            for n in sorted(wanted.keys() & found.keys())
            if list(found[n]) != list(wanted[n])
        ],
    }
    return "; ".join(f"{len(n)} tensors {what}: {', '.join(n)}" for what, n in faults.items() if n)


def _listed(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to its file. Reads every header, to find incomplete downloads."""
    if not folder.is_dir():
        raise ValueError(
            f"model.weights=pretrained: model.path={folder} is not a folder: download the model "
            "first (hf download NAME --local-dir FOLDER)"
        )
    index = folder / INDEX
    return _by_index(folder, index) if index.is_file() else _in_each(folder)


def _by_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is not a safetensors index ({type(error).__name__}: {error}): get it again"
        ) from None
    absent = sorted({f for f in listed.values() if not (folder / f).is_file()})
    if absent:
        raise ValueError(f"{index} lists missing files: {', '.join(absent)}; download them again")
    there = {f: set(_opened(folder / f)) for f in sorted(set(listed.values()))}
    wrong = sorted(f"{name} in {file}" for name, file in listed.items() if name not in there[file])
    if wrong:
        raise ValueError(f"{index} lists missing tensors: {', '.join(wrong)}; download again")
    return {name: folder / file for name, file in listed.items()}


def _in_each(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= dict.fromkeys(_opened(path), path)
    if not found:
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        hint = f" but {pickles[0]}: save the model again as safetensors" if pickles else ""
        fix = hint or ": download it whole, or leave out model.weights=pretrained"
        raise ValueError(f"model.path={folder} has no .safetensors file{fix}")
    return found


def _opened(path: Path) -> dict[str, Place]:
    """Read the layout of a file whose header fits its size. ValueError when it is incomplete."""
    try:
        return read_layout(path)
    except (ValueError, OSError) as error:
        with path.open("rb") as file:
            pointer = file.read(20).startswith(b"version https://git")
        fix = "git lfs pull fetches what it points to" if pointer else "download it again"
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) is no whole safetensors file ({error}): {fix}"
        ) from None


class Start:
    """First weights of a model, a parameter's rows at a time."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of a parameter: fp32, on the CPU or the model's device."""
        raise NotImplementedError

    def buffer(self, name: str) -> Tensor | None:
        """Return the whole buffer `name`, None where the model's own value stands."""
        return None


class SeededStart(Start):
    """The built-in decoder's start: each parameter a pure function of seed, name and shape, with
    model.init=philox each element, so that a rank draws its own rows alone, on its device."""

    def __init__(self, model: nn.Module, seed: int, cfg: ModelConfig) -> None:
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.seed, self.cfg, self.device = seed, cfg, next(model.parameters()).device

    def rows(self, name: str, first: int, last: int) -> Tensor:
        shape, seed, cfg = self.shapes[name], self.seed, self.cfg
        if cfg.init == "philox":
            return initial_rows(name, shape, (first, last), seed, cfg, self.device)
        return initial_value(name, shape, seed, cfg)[first:last]


def places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each parameter hangs, by its id: several places for a tied one."""
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                found[id(p)].append((module, name))
    return found


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give every parameter on the meta device memory on `device`, and move buffers there. Unlike
    `nn.Module.to_empty` it keeps ties, and what buffers hold."""
    for hangs in places(model).values():
        module, name = hangs[0]
        old = module._parameters[name]
        assert old is not None
        if old.is_meta:
            new = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
            for owner, attribute in hangs:
                owner._parameters[attribute] = new
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
def fill(
    model: nn.Module,
    start: Start,
    rows: Rows,
    local: Callable[[Tensor], Tensor],
    skip: Set[str] = frozenset(),
    put: Callable[[str, Tensor, Tensor], None] | None = None,
) -> None:
    """Fill each parameter's local tensor, but those in `skip`, with its `rows` of the whole, or
    hand its name, itself and these to `put`."""
    for name, p in model.named_parameters():
        if name in skip:
            continue
        values = start.rows(name, *rows(tuple(p.shape))).view(local(p).shape)
        if put is not None:
            put(name, p, values)
        else:
            local(p).copy_(values)
    for name, buffer in model.named_buffers():
        value = start.buffer(name)
        if value is not None:
            buffer.copy_(value)


def whole(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows of an unsharded parameter."""
    return 0, shape[0] if shape else 1


class RunStart(Start):
    """Weights of a run's newest whole checkpoint, or of the checkpoint that `path` is; all ranks
    make one, and take the same. ValueError lists every weight that is missing, left over, or of
    another shape."""

    def __init__(self, model: nn.Module, path: Path, seeded: Start | None = None) -> None:
        """seeded: of a scalar head that the run lacks."""
        try:
            self.saved = open_saved(path, Ranks(dist.is_available() and dist.is_initialized()))
        except ValueError as error:
            fix = "; name an older one" if isinstance(error, DamagedError) else ""
            raise ValueError(f"model.start={path}: {error}{fix}") from None
        here = {n: tuple(p.shape) for n, p in model.named_parameters()}
        there = dict(self.saved.shapes)
        self.seeded = seeded if drop_heads(here, there, "head.weight") else None
        if faults := differences(here, there):
            raise ValueError(
                f"model.start={path} is of another model: {faults}. Set model.… and "
                "data.tokenizer as in that run's config.yaml"
            )

    def rows(self, name: str, first: int, last: int) -> Tensor:
        if name == SCORE and self.seeded:
            return self.seeded.rows(name, first, last)
        try:
            return self.saved.rows(name, first, last)
        except DamagedError as error:
            raise ValueError(f"model.start: {error}; name an older one") from None
