"""Codecs by name: the built-in ones, outside ones, and every mistake."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from zpp_lab.codecs import (
    BlockCodec,
    CodecBase,
    build_codec,
    register_codec,
    registry,
)
from zpp_lab.config.codec import _CODES, CodecConfig


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(ValueError, match="block, e4m3, e5m2, none, normal"):
        build_codec(CodecConfig(codec="os.system"), torch.float32)
    with pytest.raises(ValueError, match=r"codec 'mask' .*codec=topk.* commit [0-9a-f]{8}"):
        build_codec(CodecConfig(codec="mask", keep=32), torch.float32)
    with pytest.raises(ValueError, match="bits, block_size"):
        build_codec(CodecConfig(bits=4, options={"colour": 1}), torch.float32)
    with pytest.raises(ValueError, match="bits=null"):
        build_codec(CodecConfig(codec="none", bits=4), torch.float32)
    with pytest.raises(ValueError):
        register_codec("none", BlockCodec)


@pytest.mark.parametrize(
    "given",
    [
        CodecConfig(bits=4),
        CodecConfig(codec="sham", bits=4),
        CodecConfig(codec="sign"),
        *(CodecConfig(codec="topk", keep=32, bits=b) for b in (4, None)),
    ],
)
def test_every_setting_that_a_codec_heeds_is_written_out(given: CodecConfig) -> None:
    said = given.resolved()
    codec = build_codec(given, torch.bfloat16)
    assert build_codec(CodecConfig(**said), torch.bfloat16) == codec
    own = vars(codec.codec if given.codec == "sham" else codec)
    said |= said.pop("options", {})
    unused = {"dtype", *(("bits", *_CODES) if given.bits is None else ())}
    assert {k: v for k, v in own.items() if k not in unused} == {
        k: v for k, v in said.items() if k != "codec"
    }


@dataclass
class Unhashable(CodecBase):
    radius: int


class ByIdentity(CodecBase):
    pass


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (object, {}, "from zpp_lab.codecs.CodecBase"),
        (Unhashable, {"radius": 2}, "make Unhashable a frozen dataclass"),
        (ByIdentity, {}, "make ByIdentity a frozen dataclass"),
        (Unhashable, {}, "'radius'"),
        (Unhashable, {"size": 2}, "'size'.*radius"),
    ],
)
def test_what_another_package_gets_wrong(
    monkeypatch: pytest.MonkeyPatch, factory: Any, options: dict[str, int], message: str
) -> None:
    monkeypatch.setattr(registry, "_registered", {"theirs": factory})
    with pytest.raises(ValueError, match=message):
        build_codec(CodecConfig(codec="theirs", options=options), torch.float32)


@pytest.mark.parametrize("value", ["no_such_package:Codec", "json:NoSuchCodec"])
def test_an_entry_point_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("theirs", value, "zpp_lab.codecs")
    monkeypatch.setattr(registry, "_entry_points", lambda: {"theirs": point})
    with pytest.raises(ValueError, match=value):
        build_codec(CodecConfig(codec="theirs"), torch.float32)
