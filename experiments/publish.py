"""A study's runs as the files of its page: `publish.py STUDY PAGE_FOLDER`

STUDY is the folder that `zpp-lab study` or collect.py left, or an archive of it (runs.tar.xz);
ARCHIVE/NAME is study NAME in an archive of several.
Written into PAGE_FOLDER:

    results.csv    a row a step of every run: losses, gap, bytes, tokens/s
    table.md       a row an arm: losses, gap, speed, bytes, memory and what the plan says of it;
                   which runs have not finished and how far they came; what they had in common
    study.yaml, report.md, figures/*.svg    what `zpp-lab report` makes of them; of the figures
                   those that a page links, and gap.svg where no page links one yet

`publish.py --figures STUDY OUT` writes the whole report with every figure into OUT instead.

Speeds are medians over the steps of all seeds, so evaluations and compiling stay out.

`publish.py --check PAGE_FOLDER` looks once at what is to be published: links of its pages lead to
files and headings, and the held-out losses in their tables are those of results.csv.

`publish.py --archives` renews archives.csv, which names every archive of runs with its size and
hash.
"""

from __future__ import annotations

import csv
import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zpp_lab.config.flat import stored_config
from zpp_lab.runs.reader import Run, read_metrics
from zpp_lab.study.judge.noise import noise_bands
from zpp_lab.study.judge.verdict import ArmResult, StudyResult, read_result
from zpp_lab.study.report.appendix import facts
from zpp_lab.study.report.export import export
from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.report.report import build_report
from zpp_lab.study.report.table import BAND_COLUMN, band_cell, perplexity
from zpp_lab.study.words import NOTHING, gap_text, number, percent

COLUMNS = (
    "Arm",
    "Held-out loss",
    "Perplexity",
    "Gap (nats)",
    BAND_COLUMN,
    "Verdict",
    "Seconds a step",
    "Tokens/s",
    "GB a step",
    "Bytes",
    "Between nodes",
    "Peak GiB a GPU",
    "Planned GiB",
    "Seeds",
)


def main() -> int:
    if sys.argv[1:] == ["--archives"]:
        ARCHIVES.write_text(archives(ARCHIVES.parent))
        return 0
    whole = sys.argv[1:2] == ["--figures"]
    if len(sys.argv) != 3 + whole:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.argv[1] == "--check":
        wrong = list(faults(Path(sys.argv[2])))
        print("\n".join(wrong) or "links and held-out losses are right")
        return bool(wrong)
    given, page = map(Path, sys.argv[1 + whole :])
    try:
        with unpacked(given) as study:
            build_report(study)
            page.mkdir(parents=True, exist_ok=True)
            if whole:
                for name in ("report.html", "report.md"):
                    shutil.copy(study / name, page / name)
                shutil.copytree(study / "figures", page / "figures", dirs_exist_ok=True)
                print(page / "report.html")
            else:
                publish(study, page)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@contextmanager
def unpacked(study: Path) -> Iterator[Path]:
    """The study's folder, for the time being where an archive holds it; ValueError for an archive
    of another number of studies than one, or without the study behind its name."""
    archive, name = (study.parent, study.name) if study.parent.is_file() else (study, "*")
    if not archive.is_file():
        yield study
        return
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive) as file:
        file.extractall(place, filter="data")
        held = sorted(path.parent for path in Path(place).glob("*/study.yaml"))
        found = [folder for folder in held if name in ("*", folder.name)]
        if len(found) != 1:
            names = ", ".join(folder.name for folder in held) or "no study"
            raise ValueError(f"{archive} holds {names}: give one study, as {archive}/NAME")
        yield found[0]


def publish(study: Path, page: Path) -> None:
    """Write the files of the page of a study whose report is built."""
    rows = export([study], page / "results.csv", steps=True)
    shutil.copy(study / "study.yaml", page / "study.yaml")
    figures = linked_figures(page)
    shutil.rmtree(page / "figures", ignore_errors=True)
    for name in sorted(figures):
        if (study / "figures" / name).is_file():
            (page / "figures").mkdir(exist_ok=True)
            shutil.copy(study / "figures" / name, page / "figures" / name)
    (page / "report.md").write_text(without_figures((study / "report.md").read_text(), figures))
    text = table(read_result(study))
    (page / "table.md").write_text(text)
    print(f"{text}\n{rows} rows: {page / 'results.csv'}")


def linked_figures(page: Path) -> set[str]:
    """Names of the figures of `page` that a page here or above links; gap.svg where none does."""
    folder = (page / "figures").resolve()
    texts = [path for above in (page, *page.resolve().parents[:2]) for path in above.glob("*.md")]
    links = [
        (path.parent / link).resolve()
        for path in texts
        if path.name != "report.md"
        for link in re.findall(r"\]\(([^)\s#]+\.svg)\)", path.read_text())
    ]
    return {link.name for link in links if link.parent == folder} or {"gap.svg"}


def without_figures(report: str, kept: set[str]) -> str:
    """A report's Markdown without the figures that are not kept, their captions and headings."""
    blocks: list[str] = []
    caption = False
    for block in report.strip().split("\n\n"):
        picture = re.match(r"!\[[^\]]*\]\(figures/([\w.]+)\)", block)
        gone = picture is not None and picture[1] not in kept
        if not gone and not (caption and re.match(r"[^#|*<!-]", block)):
            blocks.append(block)
        caption = gone
    levels = [len(re.match("#*", block)[0]) for block in blocks] + [1]  # type: ignore[index]
    full = [
        block
        for block, own, after in zip(blocks, levels, levels[1:], strict=False)
        if not own or not 0 < after <= own
    ]
    text = "\n\n".join(full) + "\n"
    return text if text.strip() == report.strip() else without_figures(text, kept)


def table(result: StudyResult) -> str:
    """All arms, which runs do not count and why, and the facts, in Markdown."""
    bands = noise_bands(result)
    rows = [cells(result, arm, bands) for arm in result.every]
    shared = [f"- {what}: {value}" for what, value in facts(result) if value != NOTHING]
    left_out = "\n".join(f"- {note}" for note in result.notes)
    parts = [markdown_table(COLUMNS, rows), left_out, "\n".join(shared)]
    return "\n\n".join(part for part in parts if part) + "\n"


def cells(result: StudyResult, arm: ArmResult, bands: Mapping[str, float]) -> list[str]:
    """COLUMNS of one arm as text. bands: the noise of each baseline, in nats."""
    seconds, rate = speed(arm.finished)
    sent = [b for run in arm.finished if (b := run.bytes_per_step()) is not None]
    peak = peak_gib(arm.finished)
    return [
        arm.name,
        number(arm.heldout_loss, ".4f"),
        perplexity(arm.heldout_loss),
        gap_text(arm),
        band_cell(result, arm, bands),
        arm.text,
        number(seconds, ".3f"),
        number(rate, ",.0f"),
        number(sent[0] / 1e9 if sent else None, ".3g"),
        percent(arm.bytes_total),
        percent(arm.bytes_inter),
        number(peak, ".2f"),
        number(planned_gib(arm.finished) if peak is not None else None, ".2f"),
        f"{len(arm.finished)} of {len(result.study.seeds)}",
    ]


def speed(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """Median seconds of a step, and tokens/s at that; None where no run has two steps."""
    steps = [step for run in runs for step in _steps(read_metrics(run.dir))]
    if not steps:
        return None, None
    seconds = median(s for s, _ in steps)
    return seconds, steps[0][1] / seconds if seconds > 0 else None


def _steps(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[float, int]]:
    """(seconds, tokens) of a step, from each two rows that follow one another: kept runs may have
    one step in many."""
    for before, row in pairwise(rows):
        steps = row["step"] - before["step"]
        yield (
            (row["seconds"] - before["seconds"]) / steps,
            (row["tokens"] - before["tokens"]) // steps,
        )


def peak_gib(runs: Sequence[Run]) -> float | None:
    """The most GiB of tensors that any GPU of the runs has held; None where none was."""
    peaks = [gib for run in runs for gib in (run.summary or {}).get("peak_gib") or []]
    return max(peaks, default=None)


def planned_gib(runs: Sequence[Run]) -> float | None:
    """The same as `zpp-lab plan` says it of the first run's config. None where ranks have no GPU
    each, and where nothing can be planned here, which stderr is told."""
    if not runs or not runs[0].config:
        return None
    config = stored_config(runs[0].config)
    if config.engine.name != "fsdp":
        return None
    from zpp_lab.engines.build import build_plan, vocabulary
    from zpp_lab.models import build_model
    from zpp_lab.train.memory.buffers import GIB
    from zpp_lab.train.memory.estimate import estimate
    from zpp_lab.train.resume import vocab_size

    try:
        # a tokenizer that lay on the runs' machine is not needed: they say how many tokens it has
        vocab = max(vocab_size(runs[0].dir) or vocabulary(config), config.model.vocab_size)
        plan = build_plan(build_model(config.model, vocab, "meta"), config)
        return estimate(plan, config, vocab).tensors / GIB
    except ValueError as error:
        print(f"{runs[0].dir}: no plan beside its peak: {error}", file=sys.stderr)
        return None


# ---------------------------------------------------------------------- archives

ARCHIVES = Path(__file__).with_name("archives.csv")


def archives(folder: Path) -> str:
    """The archives of runs in `folder` as CSV: file, bytes, sha256."""
    rows = [
        f"{path.relative_to(folder)},{path.stat().st_size},"
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in sorted(folder.rglob("*.tar.*"))
    ]
    return "file,bytes,sha256\n" + "".join(rows)


# ---------------------------------------------------------------------- check


def faults(folder: Path) -> Iterator[str]:
    """What is wrong with the pages in `folder`, a line each."""
    losses = heldout(folder / "results.csv")
    for page in sorted(folder.glob("*.md")):
        yield from broken_links(page)
        yield from wrong_losses(page, losses)


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        if link.startswith("http"):
            continue
        if not there.exists():
            yield f"{page}: {link}: no such file"
        elif anchor and anchor not in anchors(there):
            yield f"{page}: {link}: no such heading"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in found}


def heldout(results: Path) -> dict[str, float]:
    """Of each arm the held-out loss at the end, mean over the seeds that came there."""
    rows: list[dict[str, str]] = []
    if results.is_file():
        with results.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row.get("heldout_loss")]
    end = max((int(row.get("step", 0)) for row in rows), default=0)
    found: dict[str, list[float]] = {}
    for row in rows:
        if int(row.get("step", 0)) == end:
            found.setdefault(row.get("arm", ""), []).append(float(row["heldout_loss"]))
    return {arm: fmean(losses) for arm, losses in found.items()}


def wrong_losses(page: Path, losses: Mapping[str, float]) -> Iterator[str]:
    """Cells below "held-out loss" in the page's first table that has them."""
    column = None
    for line in page.read_text().splitlines():
        row = [cell.strip(" `*") for cell in line.strip().strip("|").split("|")]
        if column is None:
            named = (i for i, cell in enumerate(row) if cell.lower().startswith("held-out loss"))
            column = next(named, None) if line.startswith("|") else None
        elif not line.startswith("|"):
            return
        elif row[0] in losses and re.fullmatch(r"\d+\.\d+", row[column]):
            true = f"{losses[row[0]]:.{len(row[column].partition('.')[2])}f}"
            if row[column] != true:
                yield f"{page}: {row[0]}: {row[column]}, but {true} in results.csv"


if __name__ == "__main__":
    sys.exit(main())
