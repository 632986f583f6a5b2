"""Quantized collectives for sharded training, and what they do to learning.

`zpp_lab.shard(model, recipe, cluster)` brings a recipe into any training loop; see `api.py`.
"""

from typing import Any

__all__ = ["init", "recipe", "shard"]


def __getattr__(name: str) -> Any:
    """The public API, on first use: configs and studies import this package without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'zpp_lab' has no attribute {name!r}")
    from zpp_lab import api

    return getattr(api, name)
