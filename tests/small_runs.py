"""A run small enough for tests: real data path, model and engine."""

from __future__ import annotations

from pathlib import Path

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config

CORPUS = "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n\n" for i in range(400))


def corpus(folder: Path) -> Path:
    """A folder of text files to train on."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for i in range(4):
        (texts / f"part{i}.py").write_text(CORPUS)
    return texts


SHAPE = [
    "data=text",
    "data.seq_len=16",
    "data.heldout_every=2",
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn=24",
    "train.batch_size=2",
    "tracking.wandb=off",
    "engine.device=cpu",
    "engine.threads=1",
]


def small(folder: Path, *overrides: str) -> Config:
    """A config of a few milliseconds a step, in `folder`."""
    return compose(
        [
            *SHAPE,
            f"data.path={corpus(folder)}",
            f"data.cache_dir={folder / 'cache'}",
            "train.steps=12",
            "train.eval_every=4",
            "train.eval_tokens=256",
            "train.checkpoint_every=3",
            "train.warmup_steps=2",
            "tracking.telemetry_every=4",
            f"run.dir={folder / 'run'}",
            *overrides,
        ]
    )


def newest(folder: Path) -> Path:
    """A run's newest checkpoint."""
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def tensor_file(checkpoint: Path) -> Path:
    """The first of a checkpoint's files with tensors."""
    return min(checkpoint.glob("*.safetensors"))


def tear(path: Path, size: int = 1000) -> None:
    """Cut a file, or a checkpoint's tensors, short."""
    file = tensor_file(path) if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:size])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its place there."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
