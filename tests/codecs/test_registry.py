"""Codecs by name: the built-in ones, outside ones, and every mistake."""

from __future__ import annotations

import pytest
import torch

from zpp_lab.codecs import BlockCodec, RawCodec, build_codec, codec_names, register_codec
from zpp_lab.config import CodecConfig


def test_bits_make_a_block_codec_and_no_bits_none() -> None:
    assert build_codec(CodecConfig(bits=4, block_size=64), torch.float32) == BlockCodec(4, 64)
    assert build_codec(CodecConfig(), torch.bfloat16) == RawCodec(torch.bfloat16)
    assert build_codec(CodecConfig(codec="none"), torch.float32) == RawCodec(torch.float32)


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(ValueError, match="there are: block, none"):
        build_codec(CodecConfig(codec="os.system"), torch.float32)
    with pytest.raises(ValueError, match="it has: bits, block_size"):
        build_codec(CodecConfig(bits=4, options={"colour": 1}), torch.float32)
    with pytest.raises(ValueError, match="bits=null"):
        build_codec(CodecConfig(codec="none", bits=4), torch.float32)
    with pytest.raises(ValueError, match="another name"):
        register_codec("none", BlockCodec)


def test_a_registered_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from zpp_lab.codecs import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_codec("half", lambda: RawCodec(torch.float16))
    assert "half" in codec_names()
    assert build_codec(CodecConfig(codec="half"), torch.float32) == RawCodec(torch.float16)
