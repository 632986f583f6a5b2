"""Kernels against the reference on many random cases, spread over processes.

python experiments/kernels/check.py --cases 10000 --jobs 14
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def work(seeds: list[int]) -> list[str]:
    import torch

    torch.set_num_threads(1)
    from tests.ops import cases
    from zpp_lab import ops

    ops.configure("cuda")
    failed = []
    for seed in seeds:
        try:
            cases.check(seed, ops)
        except AssertionError as error:
            failed.append(str(error))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--start", type=int, default=1000)
    args = parser.parse_args()
    start, seeds = time.monotonic(), list(range(args.start, args.start + args.cases))
    if args.jobs == 1:
        failed = work(seeds)
    else:
        parts = [seeds[i :: 4 * args.jobs] for i in range(4 * args.jobs)]
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            failed = [f for part in pool.imap_unordered(work, parts) for f in part]
    for text in failed[:5]:
        print(text)
    seconds = time.monotonic() - start
    print(f"{args.cases} cases, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
