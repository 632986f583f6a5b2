"""The kernels whose counters README.md quotes, one launch each, for Nsight Compute.

ncu ... python3 experiments/kernels/counters.py
"""

from __future__ import annotations

from measure import one_segment, work

from zpp_lab.codecs import BlockCodec, kernels

NUMEL = 2**25  # 64 MiB of bf16
CASES = (
    ("encode", BlockCodec(4, 64)),
    ("encode", BlockCodec(4, 64, rounding="stochastic")),
    ("encode", BlockCodec(4, 64, hadamard=64)),
    ("decode", BlockCodec(4, 64)),
    ("reduce", BlockCodec(2, 64)),
    ("reduce", BlockCodec(4, 64)),
    ("reduce", BlockCodec(4, 64, scale_dtype="bf16")),
    ("reduce", BlockCodec(8, 64)),
    ("decode_sum_encode", BlockCodec(4, 64)),
    ("decode_sum_encode", BlockCodec(8, 64)),
)

if __name__ == "__main__":
    import torch

    kernels.configure("cuda")
    calls = [work(op, one_segment(codec, NUMEL)).prepare() for op, codec in CASES]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
