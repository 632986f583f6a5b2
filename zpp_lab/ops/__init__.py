"""Layout operators: whole parameters to payload rows and back, on CUDA kernels or plain torch.

Tensors decide: CUDA tensors take the kernels of cuda/, everything else reference.py. Both give
the same bits. `configure` forces one of them; `status` says what serves.

A payload that is read is one tensor, or `Rows` that lie in several places.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zpp_lab.codecs import Noise
from zpp_lab.layout import Layout
from zpp_lab.ops import cuda, reference
from zpp_lab.ops.backend import configure, status, use_kernels
from zpp_lab.ops.reference import padded_rows
from zpp_lab.ops.rows import MAX_ROWS, Payload, Rows, one_of, senders, whole

__all__ = [
    "MAX_ROWS",
    "Payload",
    "Rows",
    "configure",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_sums",
    "finish_sums",
    "padded_rows",
    "reduce",
    "senders",
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


def decode(layout: Layout, payload: Payload, outs: Sequence[Tensor]) -> None:
    """Payload uint8 [R, nbytes] → whole contiguous parameters, rounded once to their dtype."""
    if use_kernels(one_of(payload)):
        cuda.decode(layout, payload, outs)
    else:
        reference.decode(layout, whole(payload), outs)


def decode_sum(layout: Layout, payload: Payload, sums: Tensor) -> None:
    """Adds payload rows uint8 [K, R, nbytes] to `sums` fp32 [R, coded_numel], k = 0 first."""
    rows = whole(payload)  # telemetry alone asks for sums of `Rows`
    (cuda if use_kernels(rows) else reference).decode_sum(layout, rows, sums)


def reduce(layout: Layout, payload: Payload, out: Tensor) -> None:
    """Payload rows uint8 [K, R, nbytes] → `out` fp32 or bf16 [R, numel].

    0 + row 0 + row 1 + ... in fp32, then out of the rotated domain, then one rounding.
    """
    if use_kernels(one_of(payload)):
        cuda.reduce(layout, payload, out)
    else:
        reference.reduce(layout, whole(payload), out)


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
    before: Layout, layout: Layout, payload: Payload, noise: Noise | None, out: Tensor
) -> None:
    """The middle of a two-hop reduction: uint8 [K, R, before.nbytes] → uint8 [R, nbytes].

    Equals `decode_sum` onto zeros, then `encode_sums`, without the sums ever leaving the chip.
    """
    if use_kernels(out):
        cuda.decode_sum_encode(before, layout, payload, noise, out)
    else:
        reference.decode_sum_encode(before, layout, whole(payload), noise, out)
