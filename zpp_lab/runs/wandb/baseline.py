"""The baseline of a run, and the loss gap against it, step by step.

The baseline has the same seed, initialization and tokens, so the difference of the two losses
at one step is the effect of the recipe alone. The baseline may be ahead, behind, or not there:
what is not known yet is asked for again later, and nobody waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zpp_lab.config.flat import flat_config, quantizes
from zpp_lab.files import CONFIG, STUDY_FILE, read_yaml
from zpp_lab.runs.metrics import Record, Tail
from zpp_lab.runs.wandb.folder import RunFolder

RECIPE = "zero3"  # the baseline of runs that belong to no study
LOSSES = ("loss", "heldout_loss")
_SAME = ("seed", "model", "data", "train", "cluster")  # what makes two plain runs comparable


class Baseline:
    """The run to compare with, and the losses that it has written so far."""

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.folder = name, folder
        self._tail = Tail(folder.metrics)
        self._losses: dict[int, Record] = {}

    @property
    def prefix(self) -> str:
        """The series' common name, such as gap_vs_zero3."""
        return f"gap_vs_{self.name}"

    def refresh(self) -> None:
        """Read what the baseline has written since the last call."""
        for record in self._tail.new():
            self._losses[record["step"]] = {k: record[k] for k in LOSSES if k in record}

    def gap(self, record: Record) -> Record | None:
        """Return loss gaps in nats, at the gap's own step and tokens; None while unknown."""
        theirs = self._losses.get(record["step"])
        if theirs is None:
            return None
        both = [name for name in LOSSES if name in theirs and name in record]
        gaps = {f"{self.prefix}/{name}": record[name] - theirs[name] for name in both}
        where = {
            f"{self.prefix}/{axis}": record[axis] for axis in ("step", "tokens") if axis in record
        }
        return {**gaps, **where}


def find_baseline(run: RunFolder) -> Baseline | None:
    """Return the baseline that belongs to a run; None for a baseline itself and where there is
    none.

    In a study it is the arm that study.yaml names, ready or not; of plain runs it is a
    neighbour with recipe zero3 and the same seed, model, data, training and cluster.
    """
    config = run.config()
    study = run.path.parent.parent / STUDY_FILE
    if (config.get("run") or {}).get("study") and study.is_file():
        return _of_study(run, config, read_yaml(study))
    for path in sorted(run.path.parent.parent.glob(f"*/{run.path.name}/{CONFIG}")):
        folder = RunFolder(path.parent)
        if folder.path != run.path and _is_plain(folder.config(), config):
            return Baseline(RECIPE, folder)
    return None


def _of_study(run: RunFolder, config: dict[str, Any], study: dict[str, Any]) -> Baseline | None:
    own = config["run"].get("arm")
    arms = {arm["name"]: arm for arm in study["arms"]}
    name = (arms.get(own) or {}).get("against") or study["baseline"]
    if own in (name, study["baseline"]):
        return None
    return Baseline(name, RunFolder(run.path.parent.parent / name / run.path.name))


def _is_plain(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    named = (theirs.get("recipe") or {}).get("name")
    same = all(theirs.get(key) == ours.get(key) for key in _SAME)
    return named == RECIPE and same and theirs != ours and not quantizes(flat_config(theirs))


def is_ready(run: RunFolder, root: Path | str) -> bool:
    """Return whether a study's run can be sent whole: its baseline has ended, or it has none."""
    baseline = find_baseline(run) if (Path(root) / STUDY_FILE).is_file() else None
    return baseline is None or baseline.folder.ended() is not None
