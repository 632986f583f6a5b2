"""Kernels against the reference on many random cases, spread over processes.

    python experiments/kernels/check.py --cases 5000 --start 1000 7770000 --seconds 120

Cases of each start, one a seed. What goes wrong in a case, an operator's error too, is a failure
of that case; after a fault of the GPU nothing more is run on it. The exit status is 0 only where
every case ran and none differs. The first line says which library serves. --cpu tries the way
without a GPU: the reference against itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

LOST: list[str] = []  # of this process: why its GPU can do no more


def work(seeds: list[int], device: str, deadline: float) -> tuple[int, list[str]]:
    """How many cases ran, and what was wrong. `deadline`: unix time."""
    import torch

    torch.set_num_threads(1)
    from tests.codecs.kernels import cases
    from zpp_lab.codecs import kernels
    from zpp_lab.codecs.kernels import reference

    if device == "cuda":
        kernels.configure("cuda")
    ran, failed = 0, []
    for seed in seeds:
        if LOST or time.time() > deadline:
            break
        ran += 1
        try:
            cases.check(seed, kernels if device == "cuda" else reference, device)
        except AssertionError as error:
            failed.append(str(error))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}\n{cases.random_case(seed)}")
            LOST.extend(lost(device))
    return ran, failed


def lost(device: str) -> list[str]:
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return [str(error)]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=10000, help="of each start")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--start", type=int, nargs="+", default=[1000])
    parser.add_argument("--seconds", type=float, default=600.0, help="then no more is begun")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if not args.cpu:
        from zpp_lab.codecs.kernels import build

        print(build.serving()[1], flush=True)
    began = time.monotonic()
    seeds = [seed for start in args.start for seed in range(start, start + args.cases)]
    one = partial(work, device="cpu" if args.cpu else "cuda", deadline=time.time() + args.seconds)
    parts = [seeds[i :: 4 * args.jobs] for i in range(4 * args.jobs)]
    if args.jobs == 1:
        found = [one(part) for part in parts]
    else:
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            found = list(pool.imap_unordered(one, parts))
    ran, failed = sum(n for n, _ in found), [text for _, texts in found for text in texts]
    for text in failed[:5]:
        print(text)
    left = f", {len(seeds) - ran} not run" if ran < len(seeds) else ""
    seconds = time.monotonic() - began
    print(f"{ran} cases from {args.start}, {len(failed)} failed{left}, {seconds:.0f} s")
    return 1 if failed or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
