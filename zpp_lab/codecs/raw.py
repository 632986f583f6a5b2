"""The codec `none`: the tensor's own bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs.base import CodecBase, SegmentNoise
from zpp_lab.codecs.packing import align


@dataclass(frozen=True)
class RawCodec(CodecBase):
    """Elements in `dtype` as they lie in memory, then zeros up to 16 bytes."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return align(numel * self.dtype.itemsize)

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        assert not rotated, "the codec none has no rotation"
        own = x.to(self.dtype).contiguous().view(torch.uint8)
        out[:, : own.shape[-1]] = own
        out[:, own.shape[-1] :] = 0

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        if not numel:
            return torch.zeros(payload.shape[0], 0, device=payload.device)
        own = payload[:, : numel * self.dtype.itemsize].contiguous()
        return own.view(self.dtype).to(torch.float32)
