"""8-bit floating point with one scale a row: e4m3 (fn, without infinities) and e5m2.

    s = max(max|x| / M, 2^-126), M the format's largest number: 448 or 57344
    code = x * (1 / s), rounded to nearest even; it decodes to code * s

All fp32. A row whose M s is not finite stores s = NaN and codes of all zero bits: it decodes to
NaN. Bytes of one row: the codes, then s, each filled up with zeros to 16 bytes.

Elements down to 3e-5 (e5m2: 1e-9) of the row's largest keep four (three) significant bits, so
smaller blocks would change little; those below 2e-6 (1e-10) become 0. Colossal-AI's fp8
communication scales whole tensors and chunks in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zpp_lab.codecs.base import CodecBase, SegmentNoise
from zpp_lab.codecs.packing import align

TINY = 2.0**-126  # the smallest normal fp32
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8Codec(CodecBase):
    """Rows of 8-bit floats; see the module for numerics and bytes."""

    form: Literal["e4m3", "e5m2"]

    @property
    def most(self) -> float:
        """The largest number of the format."""
        return torch.finfo(_DTYPES[self.form]).max

    def nbytes(self, numel: int) -> int:
        return align(numel) + align(4) if numel else 0

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, f"the codec {self.form} has no rotation"
        numel = x.shape[1]
        if not numel:
            return
        x = x.to(torch.float32)
        # a tensor, since CUDA turns division by a Python number into a product
        most = torch.full((), self.most, device=x.device)
        scale = (x.abs().amax(-1, keepdim=True) / most).clamp_min(TINY)
        ok = torch.isfinite(scale * most)
        codes = torch.where(ok, x * (1.0 / scale), 0.0).to(_DTYPES[self.form])
        split = align(numel)
        out[:, :numel] = codes.view(torch.uint8)
        out[:, numel:] = 0
        out[:, split : split + 4] = torch.where(ok, scale, torch.nan).view(torch.uint8)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        if not numel:
            return torch.zeros(payload.shape[0], 0, device=payload.device)
        split = align(numel)
        codes = payload[:, :numel].contiguous().view(_DTYPES[self.form])
        scale = payload[:, split : split + 4].contiguous().view(torch.float32)
        return codes.to(torch.float32) * scale
