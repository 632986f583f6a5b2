"""Which folder a run lives in, and whether the folder already holds another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zpp_lab.config import Config
from zpp_lab.config_load import outdated
from zpp_lab.files import read_yaml
from zpp_lab.folders import check_name

# Settings that may differ between two starts of one run: they change no numbers.
FREE = (
    "run",
    "tracking",
    "engine.threads",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.checkpoint_weights_only",
    "train.checkpoint_host_gib",
    "train.checkpoint_staging_mib",
    "train.checkpoint_full_disk",
    "train.optimizer_place",
    "engine.timeout_seconds",
    "engine.silence_seconds",
)


def run_dir(config: Config) -> Path:
    """`run.dir`, or runs/<recipe>/seed<seed>; ValueError when no folder can have that name."""
    if config.run.dir:
        return Path(config.run.dir)
    check_recipe_name(config.recipe.name)
    return Path("runs") / config.recipe.name / f"seed{config.seed}"


def check_recipe_name(name: str) -> None:
    """ValueError when a run without `run.dir` would leave the folder of all runs by this name."""
    try:
        check_name(name)
    except ValueError as error:
        raise ValueError(f"recipe.name={name!r}: {error}, or set run.dir") from None


def has_ended(config: Config) -> bool:
    """Whether the run has its summary, which another start only returns."""
    return config.run.resume and (run_dir(config) / "summary.json").is_file()


def check_same_run(config: Config, folder: Path) -> None:
    """ValueError when `folder` holds a run with other settings; it names them."""
    path = folder / "config.yaml"
    if not path.is_file():
        return
    before = flat_config(read_yaml(path))
    now = flat_config(config)
    changed = differing(before, now)
    if changed:
        listed = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in changed[:5])
        raise ValueError(
            f"{folder} holds a run with other settings ({listed}). "
            "Give another run.dir, or delete the folder to start over"
        )


def flat_config(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of `config`; one that a stored mapping lacks has today's default, which is what
    it did before there was a choice. One that is gone, with a value that did what is done without
    it, is left out."""
    if isinstance(config, Config):
        return flatten(asdict(config))
    stored = {k: v for k, v in flatten(dict(config)).items() if not outdated(k, v)}
    return flatten(asdict(Config())) | stored


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
