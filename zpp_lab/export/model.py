"""From a run's folder to a folder with config.json and safetensors.

The weights are the fp32 masters, so that what is written does not depend on the recipe's wires;
`quantized.py` writes what the wires make of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.checkpoint.read import SavedWeights, newest
from zpp_lab.config import Config, load
from zpp_lab.export.merged import merge_adapters
from zpp_lab.export.shards import LIMIT, write_safetensors
from zpp_lab.export.target import Target, target_of
from zpp_lab.export.tokenizer import write_tokenizer
from zpp_lab.files import read_yaml
from zpp_lab.folders import below, missing
from zpp_lab.tracking.folder import CONFIG

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    step: int
    tensors: int
    nbytes: int


def export_hf(run: Path, out: Path, dtype: str = "fp32", limit: int = LIMIT) -> Exported:
    """Write the newest weights of the run in `run` to the new folder `out`.

    dtype: fp32, bf16 or fp16; limit: bytes of one file. The folder appears when it is whole.
    Adapters are added to their frozen base.
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
    return Exported(saved.step, len(shapes), nbytes)


def open_run(run: Path) -> tuple[Config, SavedWeights]:
    """The settings and the newest whole weights of a run, its adapters added to their base;
    ValueError when either is missing."""
    return merge_adapters(run_config(run), newest(run))


def run_config(run: Path) -> Config:
    """ValueError when `run` is no run's folder."""
    if not run.is_dir():
        raise ValueError(
            f"{run} is no run's folder: {missing(run)}; name one, such as RUNS/ARM/seed1"
        )
    if not (run / CONFIG).is_file():
        raise ValueError(
            f"{run} is no run's folder: it has no {CONFIG}{_runs_near(run)}; name one, such as "
            "RUNS/ARM/seed1"
        )
    values = read_yaml(run / CONFIG)
    try:
        return load(Config, values)
    except ValueError as error:
        raise ValueError(
            f"{run / CONFIG}: {error}; let the version of zpp_lab that wrote it read it"
        ) from None


def _runs_near(folder: Path) -> str:
    if (folder.parent / CONFIG).is_file():  # its checkpoints were named
        return f" (did you mean {folder.parent}?)"
    return below(folder, CONFIG) or below(folder, f"*/{CONFIG}")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when all went well, and else disappears."""
    if out.exists():
        raise ValueError(f"{out} is there already: name a new folder, or delete it")
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
    (folder / "config.json").write_text(text + "\n")


def _readers(target: Target, saved: SavedWeights) -> dict[str, Callable[[], Tensor]]:
    def read(name: str) -> Tensor:
        return target.arrange(name, saved.read(name))

    own = {target.names[n]: partial(read, n) for n in saved.shapes}
    return {**own, **{n: partial(_itself, b) for n, b in target.buffers.items()}}


def _itself(value: Tensor) -> Tensor:
    return value
