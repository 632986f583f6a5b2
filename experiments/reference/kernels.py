"""The kernels that serve here, against plain torch: `python experiments/reference/kernels.py SAVE`.

Those of the wheel that carry.sh makes, where it fits (`zpp-lab doctor` says), else compiled here,
and left in SAVE as such a wheel for the next call. It encodes, decodes and compares to the bit.
"""

from __future__ import annotations

import sys

import torch

from zpp_lab.codecs import BlockCodec, kernels
from zpp_lab.codecs.kernels import build, reference
from zpp_lab.codecs.layout import Layout


def main() -> int:
    try:
        path, what = build.serving()
        kernels.configure("cuda")
        check()
    except (RuntimeError, ValueError) as error:
        print(f"these kernels do not serve: {error}", file=sys.stderr)
        return 1
    if path is None:
        build.main(["--arch", "local", "--wheel", sys.argv[1]])
    print(f"{what}: loaded, equal to plain torch")
    return 0


def check() -> None:
    """ValueError where kernels and plain torch give other bytes or values."""
    for bits in (8, 6, 4, 3, 2):
        codec = BlockCodec(bits=bits, block_size=64, symmetric=bits != 4)
        layout = Layout.build(["w"], [10_007], [codec])
        values = torch.randn(10_007, generator=torch.Generator().manual_seed(bits))
        sent = [torch.zeros(1, layout.nbytes, dtype=torch.uint8, device=d) for d in ("cuda", "cpu")]
        kernels.encode(layout, [values.cuda()], None, sent[0])
        reference.encode(layout, [values], None, sent[1])
        found = torch.empty(10_007, device="cuda")
        kernels.decode(layout, sent[0], [found])
        wanted = torch.empty(10_007)
        reference.decode(layout, sent[1], [wanted])
        if not (torch.equal(sent[0].cpu(), sent[1]) and torch.equal(found.cpu(), wanted)):
            raise ValueError(f"{bits} bits: kernels and plain torch differ")


if __name__ == "__main__":
    sys.exit(main())
