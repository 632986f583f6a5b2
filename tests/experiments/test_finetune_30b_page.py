"""experiments/finetune_30b: what was made again in another call is equal to the bit."""

from __future__ import annotations

import json
import tarfile
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

from tests.experiments.published import EXPERIMENTS

HERE = EXPERIMENTS / "finetune_30b"
TEXT = (HERE / "README.md").read_text()
BASE, ARM = "finetune_30b_x2_base", "finetune_30b_x2/zero3/seed1"
GIB = 2**30


@cache
def kept(archive: str, path: str) -> str:
    with tarfile.open(HERE / f"{archive}.tar.xz") as packed:
        file = packed.extractfile(path)
        assert file is not None
        return file.read().decode()


def steps(archive: str, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept(archive, f"{run}/metrics.jsonl").splitlines()]


def digits(step: dict[str, Any]) -> dict[str, Any]:
    """All of a step but how long it took."""
    return {k: v for k, v in step.items() if k not in ("seconds", "telemetry")}


def test_every_step_that_was_made_again_is_equal() -> None:
    held = 0
    for run, made in ((BASE, 48), (ARM, 43)):
        before, again = steps("runs", run), steps("again", run)
        assert len(again) == made
        for one, other in zip(before, again, strict=False):
            assert digits(one) == digits(other), (run, one["step"])
        held += sum("heldout_loss" in step for step in again)
    assert "**All 48 steps and the 43 of `zero3` that were made are equal in every digit**" in TEXT
    assert held == 3
    assert "three held-out losses" in TEXT
    assert "91 steps are equal in every digit" in (EXPERIMENTS / "README.md").read_text()
    data = [json.loads(kept(archive, f"{BASE}/data.json")) for archive in ("runs", "again")]
    assert data[0] == data[1]


def test_the_step_that_stands_apart() -> None:
    norm = steps("again", ARM)[1]["grad_norm"]
    assert f"step 2's norm of {norm:.3f}" in TEXT
    assert f"norm is {norm:.2f} in `zero3`" in TEXT
    assert f"the base's {steps('again', BASE)[37]['grad_norm']:.0f} at step 38" in TEXT


def test_what_the_second_call_took() -> None:
    took = []
    for archive in ("runs", "again"):
        seconds = [step["seconds"] for step in steps(archive, ARM)][:43]
        took.append(median(b - a for a, b in pairwise(seconds)))
    assert f"steps 2 to 43: {took[0]:.2f} s, now {took[1]:.2f}" in TEXT
    before, now = (json.loads(kept(name, f"{BASE}/summary.json")) for name in ("runs", "again"))
    assert now["commit"].startswith("087e319")
    assert before["machine"] == now["machine"]
    beyond = [s["peak_memory_bytes"] / GIB - max(s["peak_gib"]) for s in (before, now)]
    assert (
        f"had {beyond[1]:.1f} GiB reserved beyond its tensors in place of {beyond[0]:.1f}" in TEXT
    )
    assert now["allocator_retries"] == [0, 0]
    assert f"checkpoint of weights {now['checkpoint_seconds']:.0f} s" in TEXT
