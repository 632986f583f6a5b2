"""Layout operators: whole parameters to payload rows and back, on CUDA kernels or plain torch.

Tensors decide: CUDA tensors take the kernels of cuda/, everything else reference.py. Both give
the same bits. `configure` forces one of them; `status` says what serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zpp_lab.codecs import Noise
from zpp_lab.codecs.kernels import cuda, reference
from zpp_lab.codecs.kernels.backend import configure, status, use_kernels
from zpp_lab.codecs.kernels.reference import padded_rows
from zpp_lab.codecs.layout import Layout

__all__ = [
    "configure",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_sums",
    "finish_sums",
    "padded_rows",
    "reduce",
    "status",
]


def encode(
    layout: Layout,
    sources: Sequence[Tensor],
    noise: Noise | None,
    out: Tensor,
    errors: Tensor | None = None,
) -> None:
    """Whole parameters (any float dtype, one per segment) → payload `out` uint8 [R, nbytes].

    Row r of a segment with n elements is elements [r n, (r + 1) n) of its source, zeros past
    the end; R = 1 is the gather of a rank's own shard.

    `errors` fp64 [R, segments, 9], where given, takes what the codecs did to the values, the sums
    of `codecs.errors.SUMS`, from the same pass.
    """
    (cuda if use_kernels(out) else reference).encode(layout, sources, noise, out, errors)


def decode(layout: Layout, payload: Tensor, outs: Sequence[Tensor]) -> None:
    """Payload uint8 [R, nbytes] → whole contiguous parameters, rounded once to their dtype."""
    (cuda if use_kernels(payload) else reference).decode(layout, payload, outs)


def decode_sum(layout: Layout, payload: Tensor, sums: Tensor) -> None:
    """Adds payload rows uint8 [K, R, nbytes] to `sums` fp32 [R, coded_numel], k = 0 first."""
    (cuda if use_kernels(payload) else reference).decode_sum(layout, payload, sums)


def reduce(layout: Layout, payload: Tensor, out: Tensor) -> None:
    """Payload rows uint8 [K, R, nbytes] → `out` fp32 or bf16 [R, numel].

    0 + row 0 + row 1 + ... in fp32, then out of the rotated domain, then one rounding.
    """
    (cuda if use_kernels(payload) else reference).reduce(layout, payload, out)


def encode_sums(
    before: Layout, layout: Layout, sums: Tensor, noise: Noise | None, out: Tensor
) -> None:
    """Sums of a hop with layout `before`, fp32 [R, before.coded_numel] → the next hop's payload.

    A segment whose two codecs share their rotation stays in the rotated domain.
    """
    (cuda if use_kernels(out) else reference).encode_sums(before, layout, sums, noise, out)


def finish_sums(layout: Layout, sums: Tensor) -> Tensor:
    """fp32 [R, coded_numel] → [R, numel]; `sums` itself where nothing is rotated."""
    return (cuda if use_kernels(sums) else reference).finish_sums(layout, sums)


def decode_sum_encode(
    before: Layout, layout: Layout, payload: Tensor, noise: Noise | None, out: Tensor
) -> None:
    """The middle of a two-hop reduction: uint8 [K, R, before.nbytes] → uint8 [R, nbytes].

    Equals `decode_sum` onto zeros, then `encode_sums`, without the sums ever leaving the chip.
    """
    (cuda if use_kernels(out) else reference).decode_sum_encode(before, layout, payload, noise, out)
