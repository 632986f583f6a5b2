"""All runs of a folder as one tidy table, CSV or Parquet, for whoever analyses them elsewhere.

One row a run, or one row a run and step. Columns are plain values: a missing one is empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zpp_lab.config.flat import differing, flat_config
from zpp_lab.config.parser import check_own
from zpp_lab.config.wires import Wire, wires_among
from zpp_lab.runs.reader import READOUTS, Run, read_metrics
from zpp_lab.study.judge.noise import mean_points
from zpp_lab.study.judge.verdict import ArmResult, StudyResult, read_result

if TYPE_CHECKING:
    from pandas import DataFrame

Row = dict[str, Any]
_HOPS = ("intra", "inter")
_FIRST = ("study", "arm")  # columns of every table
_NUMBERS = ("steps", "tokens", "loss", "heldout_loss", "heldout_loss_master", *READOUTS, "seconds")
_STEP_NUMBERS = ("loss", "heldout_loss", "heldout_accuracy", "lr", "grad_norm", "seconds")
_STEP_TYPES: dict[str, type] = {"study": str, "arm": str, "seed": int, "step": int}
_STEP_TYPES |= {"tokens": int, **dict.fromkeys(_STEP_NUMBERS, float)}
_STEP_TYPES |= {"gap": float, "tokens_per_s": float}
_STEP_TYPES |= {f"bytes_{hop}": int for hop in _HOPS}


def export(roots: Sequence[Path], out: Path, steps: bool = False) -> int:
    """Write the runs below all of `roots` to `out` (.csv or .parquet); returns the number of rows.

    steps: one row a step of every run in place of one row a run. ValueError for another ending,
    for a file that is not such a table, for a folder without runs, and for Parquet without the
    package pyarrow.
    """
    import pandas  # a second to import

    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{out}: unknown format; use a name that ends in .csv or .parquet")
    if out.suffix == ".csv" or not _is_parquet_of_runs(out):
        check_own("--out", out, ",".join(_FIRST))
    results = [read_result(root) for root in roots]
    if steps:
        each = (part for result in results for part in step_rows(result))
        table = pandas.concat([_frame(part, _STEP_TYPES) for part in each])
    else:
        rows = run_rows(results, roots)
        columns = rows[0] if rows else {}
        table = _frame(rows, {key: _widest({type(row[key]) for row in rows}) for key in columns})
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.tmp")
    try:
        if out.suffix == ".csv":
            table.to_csv(part, index=False, lineterminator="\n")
        else:
            table.to_parquet(part, index=False)
        os.replace(part, out)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {out}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(table)


def run_rows(results: Sequence[StudyResult], roots: Sequence[Path]) -> list[Row]:
    """Return one row a run, folder by folder, arms in the study's order, then seeds.

    Losses and gap in nats per token, heldout_accuracy the share of held-out tokens that were
    predicted (0 to 1), heldout_bits_per_byte the held-out loss in bits a byte of text, seconds of
    training and evaluation, bytes_WIRE_HOP the run's total over all ranks, quantized_WIRE the part
    of a step's bytes there that codecs made. A setting in which runs differ has a column of its own
    name, a factor of the study one called factor.NAME.
    """
    runs = [run for result in results for run in result.runs]
    flat = {run.dir: flat_config(run.config) for run in runs if run.config}
    first = next(iter(flat.values()), {})
    varying = {key for other in flat.values() for key in differing(first, other)}
    settings = sorted(varying - {"seed", "recipe.name"})
    factors = sorted(
        {name for result in results for arm in result.arms for name in arm.arm.factors}
    )
    wires = wires_among((run.summary or {}).get("bytes") or run.quantized for run in runs)
    return [
        _run_row(result, arm, seed, run, root, wires)
        | {f"factor.{name}": arm.arm.factors.get(name) for name in factors}
        | {key: flat.get(run.dir, {}).get(key) for key in settings}
        for result, root in zip(results, roots, strict=True)
        for arm in result.arms
        for seed, run in sorted(arm.runs.items())
    ]


def _run_row(
    result: StudyResult, arm: ArmResult, seed: int, run: Run, root: Path, wires: Sequence[Wire]
) -> Row:
    summary = run.summary or {}
    data, cluster, machine = (summary.get(k) or {} for k in ("data", "cluster", "machine"))
    sent = summary.get("bytes") or {}
    gpus = machine.get("gpus") or []
    return {
        "study": result.study.name,
        "arm": arm.name,
        "role": "baseline" if arm.verdict == "baseline" else arm.arm.role,
        "against": None if arm.verdict == "baseline" else result.baseline_of(arm).name,
        "seed": seed,
        "recipe": run.recipe,
        "outcome": run.outcome,
        "verdict": arm.verdict,
        **{key: summary.get(key) for key in _NUMBERS},
        "gap": arm.gaps.get(seed),
        **{f"bytes_{w}_{h}": sent.get(w, {}).get(h) for w in wires for h in _HOPS},
        "bytes_per_step": summary.get("bytes_per_step"),
        **{f"quantized_{wire}": run.quantized.get(wire) for wire in wires},
        "peak_memory_bytes": summary.get("peak_memory_bytes"),
        "model_parameters": summary.get("model_parameters"),
        "data": data.get("name"),
        "data_hash": data.get("hash"),
        "nodes": cluster.get("nodes"),
        "gpus_per_node": cluster.get("gpus_per_node"),
        **{axis: cluster.get(axis, 1) if cluster else None for axis in ("tp", "pp")},
        "cpu": machine.get("cpu"),
        "gpu": ", ".join(map(str, gpus)) or None,
        "commit": summary.get("commit"),
        "torch": (summary.get("versions") or {}).get("torch"),
        "folder": os.path.relpath(run.dir, root),
    }


def step_rows(result: StudyResult) -> Iterator[list[Row]]:
    """Yield rows of one run at a time: every step's losses, norm and bytes (the step's, all ranks).

    gap: the step's loss minus that of the arm's baseline (the mean of it and its repeats) in the
    same seed and step.
    tokens_per_s: since the record before, evaluation included; the first step has none.
    """
    for arm in result.arms:
        baseline = result.baseline_of(arm)
        for seed, run in sorted(arm.runs.items()):
            place = {"study": result.study.name, "arm": arm.name, "seed": seed}
            own = baseline.runs.get(seed)
            bases = result.base_runs(arm, seed) or ([own] if own else [])
            losses = mean_points([_losses(base) for base in bases])
            rows = [_step_row(place, record, losses) for record in read_metrics(run.dir)]
            for before, row in pairwise(rows):
                row["tokens_per_s"] = _speed(before, row)
            yield rows


def _losses(run: Run) -> dict[int, float]:
    rows = read_metrics(run.dir)
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def _step_row(place: Row, record: Row, baseline: Mapping[int, float]) -> Row:
    sent = (record.get("bytes") or {}).values()
    row = place | {"step": record["step"], "tokens": record.get("tokens")}
    row |= {key: record.get(key) for key in _STEP_NUMBERS}
    loss, other = row["loss"], baseline.get(row["step"])
    row["gap"] = None if loss is None or other is None else loss - other
    row["tokens_per_s"] = None
    return row | {f"bytes_{hop}": sum(w.get(hop, 0) for w in sent) for hop in _HOPS}


def _speed(before: Row, row: Row) -> float | None:
    if None in (before["seconds"], row["seconds"], before["tokens"], row["tokens"]):
        return None
    seconds = row["seconds"] - before["seconds"]
    return (row["tokens"] - before["tokens"]) / seconds if seconds > 0 else None


def _widest(found: set[type]) -> type:
    found = found - {type(None)}
    if len(found) == 1 and found <= {bool, int, float}:
        return found.pop()
    return float if found == {int, float} else str


def _frame(rows: Sequence[Row], types: Mapping[str, type]) -> DataFrame:
    """Return rows with columns of these types, missing values among them."""
    import pandas

    kinds = {str: "string", int: "Int64", float: "Float64", bool: "boolean"}
    columns = {
        key: pandas.array([_as(row[key], kind) for row in rows], dtype=kinds[kind])
        for key, kind in types.items()
    }
    return pandas.DataFrame(columns)


def _is_parquet_of_runs(path: Path) -> bool:
    """Return whether there is such a file. ValueError without the package that writes one."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(
            "Parquet needs the package pyarrow: pip install 'zpp_lab[export]'; or write a .csv"
        ) from None
    try:
        return tuple(pq.read_schema(path).names[: len(_FIRST)]) == _FIRST
    except (OSError, pa.ArrowInvalid):
        return False


def _as(value: Any, kind: type) -> Any:
    return None if value is None else kind(value)
