"""Quantized collectives for sharded training, and what they do to learning.

`zpp_lab.shard(model, recipe, mesh=mesh)` brings a recipe into any training loop; see `api.py`.
`zpp_lab.load(folder)` reads runs as DataFrames; see `study/frames.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zpp_lab.api import init, recipe, shard
    from zpp_lab.study.frames import load

__all__ = ["init", "load", "recipe", "shard"]


def __getattr__(name: str) -> Any:
    """The public API, on first use: configs and studies import this package without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'zpp_lab' has no attribute {name!r}")
    from importlib import import_module

    home = import_module("zpp_lab.study.frames" if name == "load" else "zpp_lab.api")
    return getattr(home, name)


def __dir__() -> list[str]:
    """The public API before its first use too, and none of the names imported for types."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING"})
