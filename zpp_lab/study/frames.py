"""`zpp_lab.load`: a folder of runs as DataFrames, for notebooks and scripts. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zpp_lab.config.flat import flat_config, flatten, run_name
from zpp_lab.runs.reader import READOUTS, Run, read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

    from zpp_lab.study.judge.verdict import ArmResult, StudyResult

_PACKAGES = ("numpy", "pandas", "scipy")
_FINAL = ("loss", "heldout_loss", "heldout_loss_master", *READOUTS, "seconds", "bytes_per_step")
_STEP = ("loss", "heldout_loss", "lr", "grad_norm", "seconds")
_JUDGED = ("gap", "low", "high", "margin", "heldout_loss", "bytes", "bytes_inter")
_P = ("p_differs", "p_inside", "p_beyond")


@dataclass(frozen=True)
class Loaded:
    """What lies in a folder of runs. Losses and gaps are in nats a token, a missing value is NaN.

    `result` has the verdicts as objects, with the study that `runs/…/study.yaml` names.
    """

    folder: Path
    result: StudyResult

    def __repr__(self) -> str:
        return f"Loaded({str(self.folder)!r}, {self.result!r})"

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on runs that are left out or have not finished."""
        return self.result.notes

    @cached_property
    def runs(self) -> DataFrame:
        """One row a run, by arm in the study's order, then by seed.

        `step` is how far it came; `gap` its held-out loss minus the baseline's of the same seed;
        `bytes/WIRE/HOP` what all its ranks sent there (HOP: intra, inside a node, or inter);
        `quantized/WIRE` the part of a wire's bytes that codecs made. Every setting has a column
        under its own name, such as `recipe.weights.bits`.
        """
        rows = [self._run(arm, run) for arm, run in self._each()]
        return _frame(rows, (*_FINAL, "gap"))

    @cached_property
    def steps(self) -> DataFrame:
        """One row a step of a run: losses, rate, norm, `bytes/WIRE/HOP` of the step over all ranks,
        `telemetry/WIRE/CLASS/MEASURE` where it was taken. Read on first use."""
        rows = []
        for _, run in self._each():
            place = {"arm": run.arm, "seed": run.seed}
            for record in read_metrics(run.dir):
                first = {"step": record["step"], **{key: record.get(key) for key in _STEP}}
                rows.append(place | first | flatten(record, join="/"))
        return _frame(rows, _STEP)

    @cached_property
    def verdicts(self) -> DataFrame:
        """One row an arm and composite: its verdict, gap, their interval (`low`, `high`),
        margin, seeds, share of the baseline's bytes, corrected p-values of the three claims."""
        return _frame([_verdict(arm) for arm in self.result.every], (*_JUDGED, *_P))

    def _each(self) -> list[tuple[ArmResult, Run]]:
        arms = self.result.arms
        return [(arm, run) for arm in arms for _, run in sorted(arm.runs.items())]

    def _run(self, arm: ArmResult, run: Run) -> dict[str, Any]:
        summary: Mapping[str, Any] = run.summary or {}
        return {
            "name": run_name(run.config) if run.config else f"{run.arm} seed{run.seed}",
            "arm": run.arm,
            "seed": run.seed,
            "recipe": run.recipe,
            "outcome": run.outcome,
            "step": run.step,
            "tokens": summary.get("tokens"),
            **{key: summary.get(key) for key in _FINAL},
            "gap": arm.gaps.get(run.seed),
            **flatten({"bytes": summary.get("bytes") or {}}, join="/"),
            **flatten({"quantized": dict(run.quantized)}, join="/"),
            "commit": summary.get("commit"),
            "folder": str(run.dir.relative_to(self.folder)),
            **{k: v for k, v in flat_config(run.config).items() if run.config and k != "seed"},
        }


def _verdict(arm: ArmResult) -> dict[str, Any]:
    gap, tests = arm.gap, arm.tests
    low, high = (gap and gap.shown) or (None, None)
    numbers = (gap and gap.mean, low, high, arm.margin, arm.heldout_loss, arm.bytes_total)
    found = (tests.differs_corrected, tests.equal_corrected, tests.beyond_corrected)
    return {
        "arm": arm.name,
        "role": arm.arm.role,
        "describe": arm.arm.describe,
        "verdict": arm.verdict,
        "note": arm.note,
        **dict(zip(_JUDGED, (*numbers, arm.bytes_inter), strict=True)),
        "seeds": len(arm.gaps),
        **dict(zip(_P, found, strict=True)),
    }


def _frame(rows: list[dict[str, Any]], numbers: Sequence[str]) -> DataFrame:
    """`numbers`: columns that are numbers even where no row has one."""
    import pandas

    rows = [{key: value for key, value in row.items() if value != {}} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pandas.DataFrame.from_records(rows, columns=columns).astype(
        dict.fromkeys((n for n in numbers if n in columns), float)
    )


def load(folder: str | Path) -> Loaded:
    """Return the runs in and below `folder` (of a run, a study or a sweep) as DataFrames.

        found = zpp_lab.load("runs/first")
        found.runs      # one row a run: losses, bytes of each wire, every setting
        found.steps     # one row a step of a run
        found.verdicts  # one row an arm, as `zpp-lab report` judges it

    ValueError where there are no runs or one cannot be read; ModuleNotFoundError without pandas.
    """
    try:
        import pandas  # noqa: F401

        from zpp_lab.study.judge.verdict import read_result
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise ModuleNotFoundError(
            f"zpp_lab.load needs {error.name}: pip install 'zpp_lab[report]'", name=error.name
        ) from None
    root = Path(folder).expanduser()
    return Loaded(root, read_result(root))
