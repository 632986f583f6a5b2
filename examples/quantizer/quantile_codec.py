"""Quantize to 4 bits: levels are quantiles of the normal distribution, as trained weights have."""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch.nn.functional import pad

from zpp_lab.codecs import CodecBase
from zpp_lab.codecs.packing import align, pack, packed_bytes, unpack

QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]  # the middle one is 0
LEVELS = torch.tensor(QUANTILES) / QUANTILES[-1]  # -1 ... 1
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


@dataclass(frozen=True)
class QuantileCodec(CodecBase):
    """Each element: the nearest of 15 levels, times the largest magnitude of its block."""

    block_size: int = 64  # the config's block_size; other fields come from `options`

    def nbytes(self, numel):
        """Exact bytes of one row: 4-bit codes, then an fp32 scale a block; a multiple of 16."""
        return packed_bytes(numel, 4) + align(4 * -(-numel // self.block_size))

    def encode(self, x, noise, out, *, rotated=False):
        """x float [R, n] → out uint8 [R, nbytes(n)], every byte of it."""
        rows, numel = x.shape
        blocks = pad(x.float(), (0, -numel % self.block_size)).view(rows, -1, self.block_size)
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-126)
        codes = torch.bucketize(blocks / scale, MIDDLES.to(x.device)).clamp_max(14)
        split = packed_bytes(numel, 4)
        pack(codes.to(torch.uint8).flatten(1)[:, :numel], 4, out[:, :split])
        out[:, split:] = 0
        out[:, split : split + 4 * scale.shape[1]] = scale.flatten(1).view(torch.uint8)

    def decode(self, payload, numel):
        """uint8 [R, nbytes(n)] → fp32 [R, n]. A NaN or Inf in a block must not become a number."""
        codes = unpack(payload[:, : packed_bytes(numel, 4)], numel, 4).long()
        start, blocks = packed_bytes(numel, 4), -(-numel // self.block_size)
        scale = payload[:, start : start + 4 * blocks].contiguous().view(torch.float32)
        each = scale.repeat_interleave(self.block_size, 1)[:, :numel]
        return LEVELS.to(payload.device)[codes] * each
