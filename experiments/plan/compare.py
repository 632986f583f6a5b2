"""What `zpp-lab plan` says beside what a real run holds; run.sh starts one for each case.

Compared is the peak of tensors: `torch.cuda.max_memory_allocated` of the fullest rank against the
estimate without its assumed constants and without peer memory, which lies outside torch's
allocator; what the device has in use after the last step, which holds everything, stands beside the
whole estimate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from steps import VOCAB, as_dict, keep, measure, start

from zpp_lab.config.compose import compose
from zpp_lab.train.memory.buffers import GIB, Estimate
from zpp_lab.train.memory.outlook import Outlook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the case in the results")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: the run")
    args = parser.parse_args()
    config = compose(["engine=fsdp", "tracking.wandb=off", *args.overrides])
    assert config.model.vocab_size in (0, VOCAB) or config.model.preset == "tiny"
    start(config)
    found = measure(config, args.steps, warm=1)
    planned = Outlook.of(config, 0).estimate
    expected = planned.tensors / GIB
    result = {
        "overrides": args.overrides,
        "planned_gib": expected,
        "planned_device_gib": planned.peak / GIB,
        "moment": planned.peak_moment,
        "items": {
            i.name: i.nbytes[planned.peak_moment] / GIB for i in planned.items if i.place == "gpu"
        },
        **as_dict(found),
    }
    keep(args.out / "plan.json", args.name, result)
    if dist.get_rank() == 0:
        print(line(args.name, expected, found.peak_gib, planned, found.used_gib), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def line(
    name: str,
    expected: float,
    peaks: list[float] | None,
    planned: Estimate,
    used: float | None,
) -> str:
    if peaks is None or used is None:
        return f"{name}: planned {expected:.2f} GiB of tensors; measured on GPUs only"
    off = expected / max(peaks) - 1
    return (
        f"{name}: planned {expected:.2f} GiB of tensors, measured {max(peaks):.2f} ({off:+.1%}); "
        f"device: planned {planned.peak / GIB:.2f}, in use {used:.2f}"
    )


if __name__ == "__main__":
    main()
