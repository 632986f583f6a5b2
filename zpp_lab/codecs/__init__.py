"""Codecs: float tensors to bytes and back. `base.py` says what one is, `families/` has ours.

A **codec** is a stateless map; `none` sends the tensor's own bytes. A **segment** is one
parameter's shard on one rank, flat; blocks of codes never cross it. A **layout** is a unit's
segments in order, and a **payload** the bytes that it takes. **Noise** decides stochastic rounding.
Plain torch here is the truth; `kernels/` runs whole layouts, on the GPU with the same bits.
"""

from zpp_lab.codecs.base import Codec, CodecBase, RawCodec, SegmentNoise, encode
from zpp_lab.codecs.families.block import BlockCodec, ShamCodec, SignCodec
from zpp_lab.codecs.families.float8 import Float8Codec
from zpp_lab.codecs.families.normal import NormalCodec
from zpp_lab.codecs.families.topk import TopKCodec
from zpp_lab.codecs.hadamard import Rotation
from zpp_lab.codecs.noise import Noise, noise_key, parameter_id
from zpp_lab.codecs.registry import build_codec, codec_names, register_codec

__all__ = [
    "BlockCodec",
    "Codec",
    "CodecBase",
    "Float8Codec",
    "Noise",
    "NormalCodec",
    "RawCodec",
    "Rotation",
    "SegmentNoise",
    "ShamCodec",
    "SignCodec",
    "TopKCodec",
    "build_codec",
    "codec_names",
    "encode",
    "noise_key",
    "parameter_id",
    "register_codec",
]
