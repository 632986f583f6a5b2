"""What `zpp-lab plan` says beside what a real run holds; run.sh starts one for each case.

Compared is the peak of tensors: `torch.cuda.max_memory_allocated` of the fullest rank against the
estimate without its assumed constants and without peer memory, which lies outside torch's
allocator; what the device has in use after the last step, which holds everything, stands beside the
whole estimate. With state in host memory (engine.place) the pages that were pinned, and with
--machine the step's seconds, beside what was planned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from steps import VOCAB, as_dict, keep, measure, start

from zpp_lab.config.compose import compose
from zpp_lab.engines.optim import host
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.train.memory.buffers import GIB, Estimate
from zpp_lab.train.memory.outlook import expected

PINNED: list[int] = []  # bytes, each time that this process pins some


class Counted(host.Pages):
    def register(self) -> None:
        super().register()
        PINNED.append(len(self))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", help="its file, for the step's time")
    parser.add_argument("--name", required=True, help="of the case in the results")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: the run")
    args = parser.parse_args()
    words = ["engine=fsdp", "tracking.wandb=off", "train.checkpoint_every=0"]
    outlook = expected(compose([*words, "train.keep_checkpoints=0", *args.overrides]))
    config, planned = outlook.config, outlook.estimate
    assert config.model.vocab_size in (0, VOCAB) or config.model.preset == "tiny"
    start(config)
    host.Pages = Counted  # type: ignore[misc]
    found = measure(config, args.steps, warm=1)
    tensors = planned.tensors / GIB
    seconds = predict(config, load_machine(args.machine)).step_s if args.machine else None
    result = {
        "overrides": args.overrides,
        "planned_gib": tensors,
        "planned_device_gib": planned.peak / GIB,
        "moment": planned.peak_moment,
        "units_in_host_memory": outlook.placed,
        "planned_pinned_gib": planned.host / GIB,
        "pinned_gib": sum(PINNED) / GIB,
        "planned_seconds": seconds,
        "items": {
            i.name: i.nbytes[planned.peak_moment] / GIB for i in planned.items if i.place == "gpu"
        },
        **as_dict(found),
    }
    keep(args.out / "plan.json", args.name, result)
    if dist.get_rank() == 0:
        print(line(args.name, tensors, found.peak_gib, planned, found.used_gib), flush=True)
        if PINNED:
            print(beside("GiB pinned", planned.host / GIB, sum(PINNED) / GIB), flush=True)
        if seconds is not None:
            print(beside("s a step", seconds, found.seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def beside(what: str, planned: float, measured: float) -> str:
    off = planned / measured - 1
    return f"  planned {planned:.2f} {what}, measured {measured:.2f} ({off:+.1%})"


def line(
    name: str,
    tensors: float,
    peaks: list[float] | None,
    planned: Estimate,
    used: float | None,
) -> str:
    if peaks is None or used is None:
        return f"{name}: planned {tensors:.2f} GiB of tensors; measured on GPUs only"
    off = tensors / max(peaks) - 1
    return (
        f"{name}: planned {tensors:.2f} GiB of tensors, measured {max(peaks):.2f} ({off:+.1%}); "
        f"device: planned {planned.peak / GIB:.2f}, in use {used:.2f}"
    )


if __name__ == "__main__":
    main()
