"""Sends a study's report to wandb: report.html and results.csv as an artifact, and two tables.

    python -m zpp_lab.study.wandb_pages.publish ROOT [--mode online|offline]

The report is a wandb run of the study's group, with job type `report`, sent by its own process.
"""

from __future__ import annotations

import argparse
import csv
import os
import secrets
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zpp_lab.files import CONFIG, STUDY_FILE
from zpp_lab.runs.reader import read_study
from zpp_lab.runs.wandb.folder import STATE as RUN_STATE
from zpp_lab.runs.wandb.folder import read_state, run_folders, write_state
from zpp_lab.runs.wandb.identity import own_tags, project_of
from zpp_lab.runs.wandb.mode import Mode, resolve
from zpp_lab.runs.wandb.process import SinkHandle, start_process
from zpp_lab.runs.wandb.run import forget, open_run

JOB_TYPE = "report"
STATE, LOG, PLACE = "wandb-report.json", "wandb-report.log", "wandb"
FILES = ("report.html", "report.md", "results.csv", "report.tex")


def can_publish(root: Path) -> bool:
    """Return whether `root` is a study's folder with a report in it."""
    return (root / STUDY_FILE).is_file() and (root / FILES[0]).is_file()


def start(root: Path) -> SinkHandle:
    """Send the report in the background, in the mode of the study's runs.

    Waits no longer than `tracking.wait_seconds`. A fault is one line on stderr: the report
    itself is on the disk.
    """
    log = root / LOG
    try:
        tracking = tracking_of(root)
        mode, _ = resolve(tracking.get("wandb", "auto"))
        if mode == "off" or not can_publish(root):
            return SinkHandle(None, log, root)
        arguments = [str(root.resolve()), "--mode", mode]
        process = start_process("zpp_lab.study.wandb_pages.publish", arguments, log)
        handle = SinkHandle(process, log, root, mode)
        handle.end(tracking.get("wait_seconds", 0))  # a batch system ends what stays behind
        return handle
    except (OSError, ValueError) as error:
        print(f"wandb: the report was not sent ({error})", file=sys.stderr)
        return SinkHandle(None, log, root)


def publish(root: Path, mode: Mode) -> str | None:
    """Write the report's run to wandb; returns its URL (None offline).

    ValueError when there is no report, RuntimeError when the server does not take it in time.
    """
    study = read_study(root)
    if study is None or not can_publish(root):
        raise ValueError(f"{root} has no study's report: run zpp-lab report {root} first")
    try:
        return _send(root, study.name, mode)
    except Exception as error:  # whatever happens in wandb, the report can be sent again
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        write_state(root / STATE, state="failed", error=text)
        forget()
        raise RuntimeError(f"{root}: the report was not sent to wandb: {text}") from None


def tracking_of(root: Path) -> dict[str, Any]:
    """Return the tracking settings of a study's first run; {} before there is one."""
    found = [run for run in run_folders(root) if (run.path / CONFIG).is_file()]
    return (found[0].config().get("tracking") or {}) if found else {}


def study_project(root: Path) -> str:
    """Return wandb's project of a study's runs."""
    sent = [root / STATE, *(run.path / RUN_STATE for run in run_folders(root))]
    there = (project for path in sent if (project := read_state(path).get("project")))
    return project_of(tracking_of(root), next(there, None))


def _send(root: Path, name: str, mode: Mode) -> str | None:
    tracking = tracking_of(root)
    known = read_state(root / STATE)
    project = study_project(root)
    run_id = known.get("id") or f"report-{secrets.token_hex(4)}"
    write_state(root / STATE, id=run_id, mode=mode, state="sending", error=None)
    shutil.rmtree(root / PLACE, ignore_errors=True)  # of an earlier attempt
    os.environ.setdefault("WANDB_DATA_DIR", str(root / PLACE))  # what an offline run will upload
    run = open_run(
        mode,
        str(root),
        float(tracking.get("timeout_seconds", 60.0)),
        summarized=True,
        id=run_id,
        name=f"{name} report",
        project=project,
        entity=tracking.get("entity"),
        group=tracking.get("group") or name,
        job_type=JOB_TYPE,
        tags=[*own_tags(tracking), "report"],
        config={"study": name},
    )
    url = run.url if mode == "online" else None
    run.log(_tables(root))
    run.log_artifact(_artifact(root, name))
    run.finish(exit_code=0)
    sent_to = {"project": project} if mode == "online" else {}
    write_state(root / STATE, state="complete", url=url, **sent_to)
    return url


def _tables(root: Path) -> dict[str, Any]:
    """`verdicts`, a row an arm, and `results`, a row a run."""
    import wandb

    from zpp_lab.study.judge.verdict import read_result
    from zpp_lab.study.report.table import verdict_rows
    from zpp_lab.study.words import in_unit

    result = read_result(root)
    verdicts = verdict_rows(result)
    columns: list[str | int] = [in_unit(result, name) for name in verdicts[0]]
    cells = [list(row.values()) for row in verdicts]
    arms = wandb.Table(columns=columns, data=cells)
    with open(root / "results.csv", newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    runs = wandb.Table(columns=list(head), data=[[_number(cell) for cell in row] for row in rows])
    return {"verdicts": arms, "results": runs}


def _number(cell: str) -> float | str | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _artifact(root: Path, name: str) -> Any:
    import wandb

    slug = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    artifact = wandb.Artifact(f"{slug}-report", type=JOB_TYPE, metadata={"study": name})
    for file in FILES:
        if (root / file).is_file():
            artifact.add_file(str(root / file), skip_cache=True)
    return artifact


def sync(paths: Sequence[Path]) -> int:
    """Send the reports of the studies among `paths` online; returns how many were refused."""
    failures = 0
    for root in filter(can_publish, paths):
        resolve("online")
        try:
            print(f"{root}: report: {publish(root, 'online')}", flush=True)
        except RuntimeError as error:
            failures += 1
            print(error, file=sys.stderr)
    return failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zpp_lab.study.wandb_pages.publish")
    parser.add_argument("root", type=Path)
    parser.add_argument("--mode", choices=["online", "offline"], default="offline")
    parser.add_argument("--parent", type=int, help="the process that starts this one")
    args = parser.parse_args(argv)
    os.nice(10)
    try:
        publish(args.root, args.mode)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
