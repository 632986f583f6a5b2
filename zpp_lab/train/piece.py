"""A run in pieces: it stops between two steps, with a checkpoint, before a given time.

The same command then goes on, here or on another machine that has the run's folder, and ends with
the bytes of a run that was never stopped.

Rank 0's clock decides for all ranks. A run that a piece has ended leaves neither summary nor
failure.
"""

from __future__ import annotations

import re
import time

PAUSED = 75  # exit code of a command whose run stopped for want of time (EX_TEMPFAIL)
UNFINISHED = "unfinished"  # the outcome of such a run
_BYTES_A_PARAMETER = {"fp32": 12, "bf16": 8, "8bit": 6}  # of weights and AdamW's moments
_BYTES_A_SECOND = 1e9  # of a rank; on a good local disk 1.7e9 were measured (experiments/kernels)
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str = "--for") -> float:
    """What `option` says: 480, 480s, 8m or 1.5h. ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{option} {text}: give a time above 0, such as 480, 480s, 8m or 1.5h")
    return float(found[1]) * _UNITS[found[2]]


def writing_seconds(numel: int, optimizer_state: str) -> float:
    """What a checkpoint of so many parameters of one process will take, before one has been
    written."""
    return numel * _BYTES_A_PARAMETER[optimizer_state] / _BYTES_A_SECOND


class Piece:
    """Says when to stop: after `steps` steps of this start (0: any number), and before a step that
    would probably end after `until` (unix seconds).

    Rank 0's clock decides for all ranks of the default process group, if there is one. An `until`
    of None asks nobody.
    """

    def __init__(self, until: float | None, steps: int = 0) -> None:
        self.until, self.steps, self.asked = until, steps, 0

    def over(self, next_step: float = 0.0) -> bool:
        """Whether to stop before the next step, which will probably take so many seconds, with the
        checkpoint after it. Every rank must call it once a step."""
        self.asked += 1
        if self.steps and self.asked > self.steps:
            return True
        if self.until is None:
            return False
        return _as_rank_0(time.time() + next_step >= self.until)

    def too_short(self, writing: float) -> str:
        """For a piece without a step: why, where its checkpoint is taken to need `writing` s."""
        left = max(0.0, (self.until or 0.0) - time.time())
        return (
            f"no step was begun: {left:.0f} s of this piece were left after its start, and a "
            f"checkpoint is taken to need {writing:.0f} s; give longer pieces (--for)"
        )


def _as_rank_0(own: bool) -> bool:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return own
    said = torch.tensor([own])
    dist.broadcast(said, src=0)
    return bool(said)
