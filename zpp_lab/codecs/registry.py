"""Codecs by name. Other packages add theirs through the entry point group `zpp_lab.codecs`.

A config names a codec and gives its settings; it can never name code to run. An entry point
is a class whose keyword arguments are the codec's settings, like

    [project.entry-points."zpp_lab.codecs"]
    lattice = "my_package.lattice:LatticeCodec"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from zpp_lab.codecs.base import Codec
from zpp_lab.codecs.block import BlockCodec
from zpp_lab.codecs.raw import RawCodec
from zpp_lab.config import CodecConfig

_registered: dict[str, Callable[..., Codec]] = {"block": BlockCodec}


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Add a codec under `name`; ValueError when the name is taken by another."""
    if name == "none" or _registered.get(name, factory) is not factory:
        raise ValueError(f"codec {name!r} exists already: register yours under another name")
    _registered[name] = factory


def codec_names() -> list[str]:
    return sorted({"none", *_registered, *_entry_points()})


def build_codec(config: CodecConfig, raw_dtype: torch.dtype) -> Codec:
    """The codec that `config` names; `none` sends `raw_dtype`.

    ValueError for an unknown name, a setting that the codec does not have, or bits on `none`.
    """
    name = config.codec or "block"
    settings = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if f.name not in ("codec", "options") and getattr(config, f.name) is not None
    }
    settings |= config.options or {}
    if name == "none" and "bits" in settings:
        raise ValueError(f"codec none with bits={settings['bits']}: leave codec out, or bits=null")
    if name == "none" or (name == "block" and "bits" not in settings):
        return RawCodec(raw_dtype)
    factory = _factory(name)
    valid = list(inspect.signature(factory).parameters)
    unknown = sorted(set(settings) - set(valid))
    if unknown:
        raise ValueError(f"codec {name} has no setting {unknown[0]!r}; it has: {', '.join(valid)}")
    return factory(**settings)


def _factory(name: str) -> Callable[..., Codec]:
    if name in _registered:
        return _registered[name]
    points = _entry_points()
    if name not in points:
        raise ValueError(f"codec {name!r} is not known; there are: {', '.join(codec_names())}")
    factory: Any = points[name].load()
    return factory


@cache
def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group="zpp_lab.codecs")}
