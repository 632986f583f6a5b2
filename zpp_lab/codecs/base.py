"""What a codec is: a stateless map from float tensors to bytes and back; and the codec `none`.

Every codec works on rows. A row is one segment, the flattened shard of one parameter on one
rank, and R rows of the same length are handled together: the gather of R ranks' shards, or a
reduction's R rows for R ranks. Blocks, padding and alignment never cross a row.

`none` (`RawCodec`) sends the tensor's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from zpp_lab.codecs.noise import Noise
from zpp_lab.codecs.packing import align


class SegmentNoise(NamedTuple):
    """Noise of one segment: the collective's noise and the parameter's id. `more` names further
    parameters whose segments of the same length are stacked below."""

    noise: Noise
    parameter: int
    more: tuple[int, ...] = ()

    def uniform(self, numel: int, device: torch.device) -> Tensor:
        """Draw fp32 [R (1 + len(more)), numel] in (0, 1)."""
        return self.noise.uniform((self.parameter, *self.more), numel, device)


class Domain(Protocol):
    """A linear map with what codecs ask of it: `hadamard.Rotation`, or a codec's own."""

    def padded(self, numel: int) -> int:
        """Return the elements of a mapped row."""
        ...

    def inverse(self, y: Tensor, numel: int) -> Tensor:
        """Map y, fp32 [R, padded(numel)], back to fp32 [R, numel]."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Encode, decode, decode-and-sum and an exact byte count. `rotation` is the linear map that the
    codec applies before it quantizes, None for most. With `rotated=True` tensors are in the rotated
    domain: [..., coded_numel(n)] in place of [..., n], so that two hops of a reduction with equal
    rotations rotate only once."""

    @property
    def rotation(self) -> Domain | None:
        return None

    @property
    def stochastic(self) -> bool:
        """Whether `encode` needs noise."""
        return False

    @property
    def one_hop(self) -> bool:
        """Whether rows add up while encoded, and only their sum is decoded: for gradients in one
        hop alone. An encoder with a residual then takes `sent`."""
        return False

    def coded_numel(self, numel: int) -> int:
        """Return the elements after the rotation's padding; numel without one."""
        return self.rotation.padded(numel) if self.rotation else numel

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one encoded row of `numel` elements, a multiple of 16."""
        raise NotImplementedError

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        """Encode x, float [R, n], into `out`, uint8 [R, nbytes(n)]; writes every byte of it."""
        raise NotImplementedError

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Decode uint8 [R, nbytes(numel)] to fp32 [R, numel]."""
        raise NotImplementedError

    def decode_sum(self, payload: Tensor, numel: int, *, rotated: bool = False) -> Tensor:
        """Decode uint8 [K, R, nbytes(numel)] to 0 + row 0 + row 1 + ..., fp32 [R, numel]."""
        assert not rotated, f"{type(self).__name__} has no rotation"
        total = torch.zeros(payload.shape[1], numel, device=payload.device)
        for row in payload:
            total += self.decode(row, numel)
        return total

    def sent(self, x: Tensor) -> Tensor:
        """Return what the encoder sends of x, fp32 [R, n]; asked only with `one_hop`."""
        assert not self.one_hop, f"{type(self).__name__} has one_hop, so it needs its own `sent`"
        return x

    def saturated(self, payload: Tensor, numel: int) -> Tensor:
        """Return each row's share of codes at either end of the code's range, float [R]."""
        return torch.zeros(payload.shape[0], device=payload.device)


class CodecBase(Codec):
    """Base class of codecs: a subclass has nbytes, encode and decode, and with `one_hop` sent."""


def encode(codec: Codec, x: Tensor, noise: SegmentNoise | None = None, **kwargs: bool) -> Tensor:
    """Encode x, float [R, n], into a new payload, uint8 [R, nbytes(n)]."""
    out = torch.empty(x.shape[0], codec.nbytes(x.shape[-1]), dtype=torch.uint8, device=x.device)
    codec.encode(x, noise, out, **kwargs)
    return out


@dataclass(frozen=True)
class RawCodec(CodecBase):
    """The codec `none`: elements in `dtype` as memory holds them, then zeros up to 16 bytes."""

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
        own = payload[:, : numel * self.dtype.itemsize].contiguous().view(self.dtype)
        return own.to(torch.float32) if self.dtype.is_floating_point else own
