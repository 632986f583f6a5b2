"""Groups along rows hold the numbers of blocks over flat shards."""

from __future__ import annotations

from math import gcd

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zpp_lab.codecs import BlockCodec, kernels
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.tools.export.packed import (
    exact_codes,
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
