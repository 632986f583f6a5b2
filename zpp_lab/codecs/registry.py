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
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch

from zpp_lab.codecs.base import Codec, RawCodec
from zpp_lab.codecs.families.block import BlockCodec, ShamCodec, SignCodec
from zpp_lab.codecs.families.float8 import Float8Codec
from zpp_lab.codecs.families.normal import NormalCodec
from zpp_lab.codecs.families.topk import TopKCodec
from zpp_lab.config.codec import CodecConfig

# a sham has the settings of the codec that it stands for
_registered: dict[str, Callable[..., Codec]] = {
    "block": BlockCodec,
    "e4m3": partial(Float8Codec, "e4m3"),
    "e5m2": partial(Float8Codec, "e5m2"),
    "normal": NormalCodec,
    "sham": BlockCodec,
    "sign": SignCodec,
    "topk": TopKCodec,
}

GONE = {  # which published runs have
    "mask": "was removed; use codec=topk, or commit 04b1c611, the last that has it",
    "sketch": "is a plugin; in a checkout: pip install ./examples/tagc",
}


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Add a codec under `name`; ValueError when another codec has the name."""
    if name == "none" or _registered.get(name, factory) is not factory:
        raise ValueError(f"codec {name!r} exists already: register it under another name")
    _registered[name] = factory


def codec_names() -> list[str]:
    return sorted({"none", *_registered, *_entry_points()})


def build_codec(config: CodecConfig, raw_dtype: torch.dtype) -> Codec:
    """Build the codec that `config` names; `none`, `sham` and `topk` send `raw_dtype`. ValueError
    for an unknown name, a setting that the codec does not have, bits on `none`, a `sham` or
    `normal` without bits, or a `topk` that keeps nothing."""
    name = config.codec or "block"
    settings = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if f.name not in ("codec", "options", "memory") and getattr(config, f.name) is not None
    }
    settings |= config.options or {}
    if name == "none" and "bits" in settings:
        raise ValueError(f"codec=none with bits={settings['bits']}: leave codec out, or bits=null")
    if name == "none" or (name == "block" and "bits" not in settings):
        return RawCodec(raw_dtype)
    factory = _factory(name)
    if name == "topk":
        config.check()
        factory = partial(TopKCodec, raw_dtype)
        settings = {k: v for k, v in settings.items() if k not in ("hadamard", "random_signs")}
    _check_settings(name, factory, settings)
    if name in ("normal", "sham"):
        config.check()
    if name == "sham":
        return ShamCodec(raw_dtype, BlockCodec(**settings))
    codec = factory(**settings)
    ours = name in ("block", "normal", "topk")
    return codec if ours else _checked(name, codec, factory(**settings))


def _check_settings(name: str, factory: Callable[..., Codec], settings: dict[str, Any]) -> None:
    # a plan asks for the same class thousands of times; a `partial` is another one each time
    signature = (_signature if isinstance(factory, type) else inspect.signature)(factory)
    valid = ", ".join(signature.parameters)
    try:
        signature.bind(**settings)
    except TypeError as error:
        unknown = sorted(set(settings) - set(signature.parameters))
        problem = f"has the unknown setting {unknown[0]!r}" if unknown else f"is not built: {error}"
        raise ValueError(
            f"codec {name} {problem}; valid settings: {valid or 'none: leave it out'}"
        ) from None


def _checked(name: str, codec: Any, again: Any) -> Codec:
    """Return `codec`; ValueError before the run for another package's faults."""
    kind = type(codec).__name__
    if not isinstance(codec, Codec):
        raise ValueError(f"codec {name}: derive {kind} from zpp_lab.codecs.CodecBase")
    try:
        equal = codec == again and hash(codec) == hash(again)
    except TypeError:  # a plain dataclass has no hash
        equal = False
    if not equal:
        raise ValueError(
            f"codec {name}: make {kind} a frozen dataclass, so that equal settings compare equal"
        )
    return codec


def _factory(name: str) -> Callable[..., Codec]:
    if name in _registered:
        return _registered[name]
    points = _entry_points()
    if name not in points and name in GONE:
        raise ValueError(f"codec {name!r} {GONE[name]}")
    if name not in points:
        raise ValueError(f"codec {name!r}: unknown; valid names: {', '.join(codec_names())}")
    point = points[name]
    try:
        factory: Any = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"codec {name}: cannot load {point.value!r} ({error}); fix or reinstall its package"
        ) from error
    return factory


_signature = cache(inspect.signature)


@cache
def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group="zpp_lab.codecs")}
