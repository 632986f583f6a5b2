"""What became of a run, in words: running, stopped, failed and why, or never started.

Only finished runs have a loss to judge; whoever reads a verdict must see which runs stand behind
it, which do not, and how far those came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zpp_lab.study.runs import Run

NOT_JUDGED = "not judged"
# verdicts that say nothing of loss
NO_ANSWER = ("no baseline", "not run", "unfinished", "failed", NOT_JUDGED)
NOT_STARTED = "not started"
_STATES = {"unfinished": "stopped", "out_of_memory": "out of memory"}
_PREDICATES = {  # of one run, of several
    NOT_STARTED: ("has not been started", "have not been started"),
    "running": ("is running", "are running"),
    "out of memory": ("ran out of memory", "ran out of memory"),
}


def state(run: Run | None) -> str:
    """finished, running, stopped, diverged, crashed, out of memory or not started.

    stopped: it began, and left neither a summary nor a failure of its own: Ctrl-C, SIGTERM, --for,
    or whatever else ended its process.
    """
    if run is None:
        return NOT_STARTED
    if run.running:
        return "running"
    return _STATES.get(run.outcome, run.outcome)


def reached(run: Run) -> str:
    """How far a run came: "after step 120 of 300", or "before step 1"."""
    if run.step == 0:
        return "before step 1" + (f" of {run.steps}" if run.steps is not None else "")
    return f"after step {run.step}" + (f" of {run.steps}" if run.steps is not None else "")


def cause(run: Run | None) -> str:
    """The first line of what a run that failed has said; "" for others."""
    if run is None or run.running or state(run) == "stopped":
        return ""
    if run.failure is not None:
        lines = str(run.failure.get("error", "")).strip().splitlines()
        return lines[0][:200].rstrip(".") if lines else ""
    return "its held-out loss is no number" if state(run) == "diverged" else ""


def told(run: Run | None, several: bool = False) -> str:
    """A predicate for a run that has not finished, or for several alike: "crashed after step 3 of
    12 (it broke)"."""
    name, why = state(run), cause(run)
    said = _PREDICATES.get(name, (name, name))[several]
    if run is None:
        return said
    return f"{said} {reached(run)}" + (f" ({why})" if why else "")


def failures(runs: Sequence[Run]) -> str:
    """How the failed runs of an arm ended, without their causes."""
    ends = dict.fromkeys(f"{state(run)} {reached(run)}" for run in runs)
    return ", ".join(ends if len(ends) < 3 else dict.fromkeys(map(state, runs)))


def standing(runs: Mapping[int, Run], seeds: Sequence[int]) -> str:
    """How far an arm has come that has begun and of which no run has finished."""
    planned = {*seeds, *runs}
    furthest = max(runs.values(), key=lambda run: run.step)
    if len(planned) == 1:
        return f"{state(furthest)} {reached(furthest)}"
    active = sum(run.running for run in runs.values())
    began = f"{len(runs)} of {len(planned)} runs began" + (f", {active} running" * (active > 0))
    return f"{began}; the furthest is {reached(furthest)}"
