"""Whether a run had its GPU for itself: what its seconds mean for the runs still to come.

GPU time adds up where kernels fill the GPU: runs that share one need together what they would need
one after the other, and no setting makes that less. Two runs of 350M beside each other took 2.12 s
a step each, alone 1.06 (experiments/pretrain_350m). Runs that leave their GPU idle in between, for
which nothing is measured, need less.
"""

from __future__ import annotations

import json
from pathlib import Path

from zpp_lab.files import write_atomic
from zpp_lab.study.runs import read_json

FILE = "shared.json"  # in the folder of a run that finished on a part of a GPU
ADDED = (
    "Runs that share a GPU are taken to need together what they need one after the other, as two "
    "of 350M did (each took 1.99 times as long); less where they leave it idle, which nobody "
    "measured."
)
AS_THEY_RAN = "Times of finished runs that shared a GPU count as they ran there, beside others."


def note(folder: Path, fraction: float) -> None:
    """Of a run that has finished on so much of each of its GPUs."""
    if fraction < 1:
        write_atomic(folder / FILE, json.dumps({"gpu_share": fraction}) + "\n")
    else:
        (folder / FILE).unlink(missing_ok=True)


def has_shared(folder: Path) -> bool:
    """False of a run from before this was noted."""
    return read_json(folder / FILE) is not None
