"""Which seeds a study runs next: more for the arms that are still undecided, up to a cap.

A study with `max_seeds` above its first seeds adds `seeds_per_look` seeds at a time to every arm
that is undecided after all runs of the look before have ended. What repeated looking costs is
paid for in `family.py`.
"""

from __future__ import annotations

from zpp_lab.config import StudyConfig
from zpp_lab.study.family import replay
from zpp_lab.study.verdict import StudyResult, entries


def next_seeds(study: StudyConfig, result: StudyResult) -> dict[str, list[int]]:
    """Arm → further seeds to run now; empty when all is decided or the cap is reached.

    A pure function of the runs that have ended, so a study that was killed and started again
    asks for the same seeds. Runs of a look that have not ended are asked for again; failed runs
    are not. Baselines come first, with the seeds that their arms' pairs lack.
    """
    if study.max_seeds <= len(study.seeds):
        return {}
    missing = replay(study, entries(study, result.arms)).missing
    arms = {arm.name: arm for arm in result.arms}
    todo: dict[str, set[int]] = {}
    for name, seeds in missing.items():
        for side in (result.baseline_of(arms[name]).name, name):
            runs = arms[side].runs
            left = [s for s in seeds if s not in runs or runs[s].outcome == "unfinished"]
            todo.setdefault(side, set()).update(left)
    bases = {result.baseline_of(arms[name]).name for name in missing}
    order = sorted(todo, key=lambda name: name not in bases)
    return {name: sorted(todo[name]) for name in order if todo[name]}
