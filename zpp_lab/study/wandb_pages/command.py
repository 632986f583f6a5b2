"""`zpp-lab dashboard`: a study's pages as a file, and into wandb where there is a key for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zpp_lab.config.compose import load_study
from zpp_lab.config.schema import TrackingConfig
from zpp_lab.config.study import StudyConfig
from zpp_lab.files import STUDY_FILE, nearest
from zpp_lab.runs.reader import read_study
from zpp_lab.runs.wandb.mode import find_key, resolve
from zpp_lab.study.wandb_pages.apply import apply
from zpp_lab.study.wandb_pages.publish import tracking_of
from zpp_lab.study.wandb_pages.spec import FILE, make_spec, read_spec, write_spec


def dashboard(
    target: str, out: Path | None = None, project: str | None = None, entity: str | None = None
) -> int:
    """Write the specification for a study's folder, name or YAML file, and apply it if online.

    Without a key for wandb the file is all: `apply_file` takes it later, anywhere. Returns the
    exit code. ValueError for what is no study.
    """
    root = Path(target)
    if root.is_dir():
        study, tracking = _study_of(root), tracking_of(root)
        out, (verdicts, told) = out or root / FILE, _judged(root)
    else:
        study, tracking, verdicts, told = _planned(root, target), {}, "", []
        out = out or Path(f"{study.name}-{FILE}")
    spec = make_spec(
        study,
        project=project or tracking.get("project") or TrackingConfig().project,
        entity=entity or tracking.get("entity"),
        verdicts=verdicts,
        told=told,
    )
    write_spec(out, spec)
    mode, why = resolve("auto")
    if mode == "online":
        return apply_file(out)
    print(f"{out}: the pages' specification. Not applied ({why}); with a key for wandb:")
    print(f"  zpp-lab dashboard --apply {out}")
    return 0


def apply_file(path: Path) -> int:
    """Make the pages that a specification describes; prints their addresses.

    ValueError without the package, a key or a specification; 1 when the service refuses.
    """
    spec = read_spec(path)
    if find_key() is None:
        raise ValueError("pages need a key for wandb: run `wandb login` or set WANDB_API_KEY")
    try:
        print("\n".join(apply(spec)))
    except ValueError:
        raise
    except Exception as error:  # wandb's, the network's: the file is there for another time
        print(
            f"wandb did not take the pages ({type(error).__name__}: {error}); later: "
            f"zpp-lab dashboard --apply {path}",
            file=sys.stderr,
        )
        return 1
    return 0


def _planned(root: Path, target: str) -> StudyConfig:
    """A study by its name or YAML file."""
    try:
        return load_study(target)
    except ValueError as error:
        near = nearest(root)
        hint = f", or a study's folder: did you mean {near}?" if near and near.is_dir() else ""
        raise ValueError(f"{error}{hint}") from None


def _study_of(root: Path) -> StudyConfig:
    study = read_study(root)
    if study is None:
        raise ValueError(
            f"{root} is no study's folder: it has no {STUDY_FILE}; give one that zpp-lab study made"
        )
    return study


def _judged(root: Path) -> tuple[str, list[str]]:
    """(the verdict table as of now, the arms that the report tells apart); nothing and a word on
    stderr without the packages that judge."""
    try:
        from zpp_lab.study.judge.verdict import read_result
        from zpp_lab.study.report.contents import verdict_table
        from zpp_lab.study.report.figures.gap import telling_arms
        from zpp_lab.study.report.render import table_markdown
        from zpp_lab.study.report.table import margin_line
    except ModuleNotFoundError as error:
        print(
            f"the pages get no verdicts ({error}): pip install 'zpp_lab[report]', then this again",
            file=sys.stderr,
        )
        return "", []
    result: Any = read_result(root)
    notes = "\n".join(f"- {note}" for note in result.notes)
    verdicts = table_markdown(verdict_table(result))
    text = "\n\n".join(filter(None, [verdicts, margin_line(result), notes]))
    return text, telling_arms(result)
