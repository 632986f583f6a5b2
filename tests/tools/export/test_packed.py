"""Groups along rows hold the numbers of blocks over flat shards."""

from __future__ import annotations

from math import gcd

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zpp_lab.codecs import BlockCodec, kernels
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.tools.export.packed import (
    codes_with_zero_points,
    exact_codes,
    stored,
    stored_shapes,
    widest_group,
)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 6, 8]),
    block=st.sampled_from([16, 32, 64, 256]),
    rows=st.integers(1, 13),
    columns=st.integers(1, 80),
    world=st.integers(1, 5),
    narrow=st.booleans(),
)
def test_every_number_of_the_wire(
    bits: int, block: int, rows: int, columns: int, world: int, narrow: bool
) -> None:
    codec = BlockCodec(bits, block, scale_dtype="bf16" if narrow else "fp32")
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    n = Parameter("w", (rows, columns), world).shard_numel
    layout = Layout.build(["w"], [n], [codec])
    payload = torch.empty(world, layout.nbytes, dtype=torch.uint8)
    kernels.encode(layout, [weight], None, payload)
    wire = torch.empty_like(weight)
    kernels.decode(layout, payload, [wire])
    widest = widest_group([(codec, columns)])
    assert widest == gcd(block, columns)
    for group in {widest, 1}:
        codes = exact_codes(codec, payload, n, (rows, columns), group)
        assert torch.equal(codes.decoded(), wire)
        assert codes.scales.shape == (rows, columns // group)


def test_the_library_unpacks_what_is_stored() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    for codec in (
        BlockCodec(2, 16),
        BlockCodec(3, 16),
        BlockCodec(6, 16),
        BlockCodec(4, 16, symmetric=False),
    ):
        payload = torch.empty(1, codec.nbytes(weight.numel()), dtype=torch.uint8)
        codec.encode(weight.view(1, -1), None, payload)
        if codec.symmetric:
            codes = exact_codes(codec, payload, weight.numel(), (6, 48), 16)
        else:
            codes = codes_with_zero_points(codec, weight, 16)
        parts = stored(codes)
        told = stored_shapes(codes.grid, (6, 48))
        assert {n: (tuple(t.shape), t.dtype) for n, t in parts.items()} == {
            n: (shape, dtype or torch.float32) for n, (shape, dtype) in told.items()
        }
        scheme = QuantizationScheme.model_validate(codes.grid.scheme(["Linear"]))
        compressor = BaseCompressor.get_value_from_registry(codes.grid.format)
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], codes.decoded())
