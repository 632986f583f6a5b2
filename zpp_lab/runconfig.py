"""Which folder a run lives in, and whether the folder already holds another run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from zpp_lab.config import Config
from zpp_lab.files import write_atomic

# Settings that may differ between two starts of one run: they change no numbers.
FREE = (
    "run",
    "tracking",
    "engine.threads",
    "train.checkpoint_every",
    "train.checkpoint_last",
    "train.keep_checkpoints",
    "engine.timeout_seconds",
    "engine.silence_seconds",
)


DATA = "data.txt"  # the hash of a run's tokens


def run_dir(config: Config) -> Path:
    """`run.dir`, or runs/<recipe>/seed<seed>."""
    if config.run.dir:
        return Path(config.run.dir)
    return Path("runs") / config.recipe.name / f"seed{config.seed}"


def check_same_run(config: Config, folder: Path) -> None:
    """ValueError when `folder` holds a run with other settings; it names them."""
    path = folder / "config.yaml"
    if not path.is_file():
        return
    before = flatten(yaml.safe_load(path.read_text()) or {})
    now = flatten(asdict(config))
    changed = differing(before, now)
    if changed:
        listed = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in changed[:5])
        raise ValueError(
            f"{folder} holds a run with other settings ({listed}). "
            "Give another run.dir, or delete the folder to start over"
        )


def check_same_data(folder: Path, own: str, resumed: bool) -> None:
    """ValueError when the run in `folder` had other tokens before: a corpus changes with the
    machine it is read from. `own`: the data's hash now."""
    path = folder / DATA
    before = path.read_text().strip() if path.is_file() else own
    if resumed and before != own:
        raise ValueError(
            f"{folder} was trained on other tokens (data {before[:16]} there, {own[:16]} now): go "
            "on where the same files are, or start over in another folder"
        )


def note_data(folder: Path, own: str) -> None:
    """Leave the data's hash for `check_same_data`; rank 0 alone calls it."""
    write_atomic(folder / DATA, own + "\n")


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Dotted names that differ, apart from those that change no numbers."""
    keys = sorted(set(before) | set(now))
    return [k for k in keys if before.get(k) != now.get(k) and not _free(k)]


def _free(key: str) -> bool:
    return any(key == name or key.startswith(name + ".") for name in FREE)


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; lists are values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return out
