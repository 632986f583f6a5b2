"""What a study's report shows: all that is read from its runs, and the sections made of that."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from zpp_lab.config.schema import LEAST_HELDOUT
from zpp_lab.files import COMPLETIONS
from zpp_lab.runs.reader import Run
from zpp_lab.runs.wandb.folder import STATE, read_state
from zpp_lab.study.judge.answer import answer
from zpp_lab.study.judge.certainty import COLUMNS as CERTAINTY_COLUMNS
from zpp_lab.study.judge.certainty import Certainty, certainty
from zpp_lab.study.judge.claims import MARK
from zpp_lab.study.judge.effects import (
    Estimate,
    Interaction,
    MainEffect,
    cells_of,
    interactions,
    level_text,
    main_effects,
)
from zpp_lab.study.judge.families import look_sizes
from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import StudyResult, pairwise
from zpp_lab.study.report.appendix import Appendix, facts, given, scope
from zpp_lab.study.report.figures.curves import MEASURES, StudyCurves, study_curves
from zpp_lab.study.report.figures.curves import Row as CurveRow
from zpp_lab.study.report.figures.draw import left_out, make_figures
from zpp_lab.study.report.figures.gap import telling_arms
from zpp_lab.study.report.sections import (
    Badge,
    Column,
    Content,
    Document,
    Figure,
    Fold,
    Links,
    Row,
    Section,
    Table,
    Terms,
    Text,
    numbers,
    words,
)
from zpp_lab.study.report.speed.contents import (
    SpeedFindings,
    break_even_table,
    find_speeds,
    headlines,
    match_table,
    notes,
    speed_method,
    speed_table,
)
from zpp_lab.study.report.speed.figures import highlighted, make_speed_figures
from zpp_lab.study.report.style import Look, Style, arm_looks, study_looks
from zpp_lab.study.report.table import (
    band_widths,
    interval_line,
    margin_line,
    p_value_line,
    verdict_rows,
)
from zpp_lab.study.speed.results import BASE, Predict
from zpp_lab.study.speed.speeds import StudySpeeds, study_speeds
from zpp_lab.study.words import NOTHING, gap_text, margin_nats, number, signed

_EXAMPLES = 4  # completions of an arm
_ESTIMATE = ("From", "To", "Seeds", "Groups")
_BEFORE_SPEED = ("gap", "gap_vs_bytes", "gap_vs_speed")
_SHOWN = ("gap_vs_bytes", "gap_vs_speed")  # the other figures are behind folds


@dataclass(frozen=True)
class Findings:
    """All that the page and the text show, read from the runs once."""

    result: StudyResult
    curves: StudyCurves
    effects: Sequence[MainEffect]
    pairs: Sequence[Interaction]
    speeds: StudySpeeds | None  # of the study's arms, None where no speed.csv lies in its folder
    speed: SpeedFindings | None  # of all measured arms
    certainty: Certainty
    appendix: Appendix
    root: Path  # of the page


def find_out(root: Path, result: StudyResult, predict: Predict | None = None) -> Findings:
    """Collect what the report says of `result`, the judged runs below `root`."""
    speeds = study_speeds(root, result)
    cells = [] if one_seed(result) else cells_of(result)  # one seed: effects without intervals
    confidence = result.study.confidence
    return Findings(
        result,
        study_curves(result, telling_arms(result)),
        main_effects(cells, confidence),
        interactions(cells, confidence),
        speeds,
        find_speeds(speeds.measured, predict) if speeds else None,
        certainty(result),
        Appendix(result),
        root,
    )


def draw(found: Findings) -> list[Figure]:
    """Return all figures; those of speed come after the gap's against speed or bytes."""
    by_place = found.speeds.by_place if found.speeds else {}
    made = make_figures(found.result, found.curves, found.effects, found.pairs, by_place)
    if found.speed is None:
        return made
    names = [figure.name for figure in made]
    place = max((names.index(n) for n in _BEFORE_SPEED if n in names), default=-1) + 1
    return [*made[:place], *make_speed_figures(found.speed, _speed_style(found)), *made[place:]]


def _speed_style(found: Findings) -> Style:
    """A measured arm has the colour of the study's arm that it is the speed of, where there is
    one; the others take colours that are left. Plain FSDP2, the base, is black."""
    assert found.speed is not None
    assert found.speeds is not None
    own = study_looks(found.result.study, telling_arms(found.result))
    taken: dict[str, Look] = {}
    for arm, look in own.items():
        for name in found.speeds.matches.get(arm, [])[:1]:
            if name != BASE and arm != found.result.study.baseline:
                taken.setdefault(name, look)
    names = highlighted(found.speed)
    taken = {name: look for name, look in taken.items() if name in names}
    return Style(arm_looks([*taken, *names], BASE, taken=taken), BASE)


# ------------------------------------------------------------------- sections


def study_document(found: Findings, figures: Sequence[Figure]) -> Document:
    """Return the whole report; figures: those of `draw`."""
    result, tests = found.result, certainty_table(found.certainty)
    certain: list[Content] = [
        Text(found.certainty.lines()),
        tests,
        Text([p_value_line(result)] if tests.rows else [], soft=True),
    ]
    first, *more = answer(result)
    lead: list[Content] = [Text([first])]
    lead += [figure for figure in figures if figure.name == "gap"]
    lead += [Text([" ".join([*more, scope(result)])])]
    others = [figure for figure in figures if figure.name != "gap"]
    sections = [
        Section("Answer", "answer", lead),
        Section("Arms", "arms", _arms(found)),
        Section("What was compared", "opening", [opening(result)]),
        Section("Notes", "notes", [Text(result.notes, "list")]),
        Section("Figures", "figures", _figures(found, others)),
        Section("Completions", "completions", [completions_table(result)], folded=True),
        Section("Measured speed", "speed", _speed(found), folded=True),
        Section("How it is decided", "decision", [Text(decision(result))], folded=True),
        Section("How sure", "certain", certain, folded=True),
        Section("Run it again", "again", _again(found), folded=True),
        Section("Machine, data and versions", "machine", [facts_table(result)], folded=True),
    ]
    return Document("zpp_lab study", result.study.name, result.study.question, sections)


def _arms(found: Findings) -> list[Content]:
    result, whole = found.result, verdict_table(found.result)
    pairs = pair_table(result)
    text = (
        f"Each pair is judged as arms are against {result.compared_with}: same seeds, margin and "
        f"tests, corrected for these {len(pairs.rows)} pairs (Holm) on their own. Worse: the first "
        "one's loss is higher."
    )
    return [
        arm_table(result, found.root),
        Text([f"{margin_line(result)} Every run is in `results.csv`."], soft=True),
        Fold("All columns", [whole]),
        Fold("Arms against each other", [Text([text] if pairs else [], soft=True), pairs]),
    ]


def _figures(found: Findings, figures: Sequence[Figure]) -> list[Content]:
    """Each with what belongs to it, then all measures of the codecs' errors."""
    texts = left_out(found.result, found.curves)
    content: list[Content] = [] if figures else [Text(["No run has data for more figures yet."])]
    content.append(Text(texts, soft=True))
    extras: dict[str, list[Text | Table]] = {
        "gap_vs_speed": [Text(_measured_on(found), soft=True)],
        "main_effects": [
            Text(effect_notes(found.effects), soft=True),
            effects_table(found.effects),
        ],
        "interactions": [interactions_table(found.pairs)],
    }
    for figure in figures:
        shown = [figure, *extras.get(figure.name, [])]
        content += shown if figure.name in _SHOWN else [Fold(figure.title, shown)]
    measures = [telemetry_table(found.curves.telemetry)]
    return [*content, Fold("Codec error: all measures as a table", measures, page_only=True)]


def _measured_on(found: Findings) -> list[str]:
    if found.speeds is None:
        return []
    missing = ", ".join(found.speeds.missing)
    return [
        f"Measured on: {found.speeds.machine}.",
        *([f"Arms without a measurement: {missing}."] if missing else []),
    ]


def _speed(found: Findings) -> list[Content]:
    if found.speed is None or found.speeds is None:
        return []
    return [
        Text([*headlines(found.speed), *notes(found.speed)], "list"),
        break_even_table(found.speed),
        match_table(found.speeds, [arm.name for arm in found.result.arms]),
        speed_table(found.speed),
        Text(speed_method(), soft=True),
    ]


def _again(found: Findings) -> list[Content]:
    result = found.result
    summaries = [run.summary for run in result.runs if run.summary]
    commits = {s.get("commit") if "commits" not in s else None for s in summaries}
    commit = commits.pop() if len(commits) == 1 else None
    whole = "The whole study: `zpp-lab study study.yaml`, with the `study.yaml` next to this page."
    lines = [
        whole if any(arm.arm.overrides for arm in result.arms) else "",
        f"The runs were made at commit `{commit}`." if commit else "",
        "For another seed of an arm, change `seed=`.",
    ]
    settings = Text(found.appendix.baseline_settings(), "code")
    return [
        Text([" ".join(filter(None, lines))]),
        commands_table(result, found.appendix),
        differences_table(result, found.appendix),
        Fold(f"{result.study.baseline}: settings that are not the defaults", [settings], True),
    ]


# --------------------------------------------------------------------- tables


def arm_table(result: StudyResult, root: Path) -> Table:
    """Return what the figure of gaps does not show, for the page alone."""
    describe = any(arm.arm.describe for arm in result.every)
    columns = words("Arm", "Verdict", *["What it does"] * describe)
    found = verdict_rows(result)
    shown = [n for n in ("Held-out loss", "Perplexity", "Bytes", "Seeds") if n in found[0]]
    columns += numbers(*("Bytes, all links" if name == "Bytes" else name for name in shown))
    columns.append(Column("Runs", "links"))
    rows = [
        Row(
            [
                arm.name,
                Badge(arm.verdict, arm.verdict, arm.note),
                *([arm.arm.describe or NOTHING] if describe else []),
                *(cells[name] for name in shown),
                run_links(root, arm.runs),
            ],
            arm.name,
        )
        for arm, cells in zip(result.ranked, found, strict=True)
    ]
    return Table("verdicts", "What each arm does", columns, rows, page_only=True)


def pair_table(result: StudyResult) -> Table:
    """Return arms against each other; none with one seed, which has no test."""
    rows = [
        Row([one, other, Badge(apart.verdict, apart.verdict), gap_text(apart)], one)
        for one, other, apart in pairwise(result)
        if apart.gap is not None and apart.gap.interval is not None
    ]
    columns = [*words("Arm", "Against", "Verdict"), *numbers("Gap (nats)")]
    return Table("pairs", "Every two arms", columns, rows)


def verdict_table(result: StudyResult) -> Table:
    """Return one row an arm. What it does comes last, so that a narrow screen shows the verdict."""
    found = verdict_rows(result)
    describe = any(arm.arm.describe for arm in result.every)
    rows = []
    for arm, cells in zip(result.ranked, found, strict=True):
        name, _, *others = cells.values()
        others += [arm.arm.describe or NOTHING] if describe else []
        rows.append(Row([name, Badge(arm.verdict, arm.verdict, arm.note), *others], arm.name))
    first, verdict, *others = found[0]
    columns = [*words(first, verdict), *numbers(*others), *words(*["What it does"] * describe)]
    return Table("whole", f"Every arm against {result.compared_with}", columns, rows)


def effects_table(effects: Sequence[MainEffect]) -> Table:
    """Return the numbers of the main effects figure."""
    rows = [
        Row([effect.factor, level_text(level, effect.factor), *_estimate(e), str(effect.groups)])
        for effect in effects
        for level, e in effect.levels.items()
    ]
    columns = [*words("Factor", "Level"), *numbers("Mean gap (nats)", *_ESTIMATE)]
    return Table("effects", "Mean gap by level", columns, rows)


def interactions_table(found: Sequence[Interaction]) -> Table:
    """Return how far each pair of factors is from additive, at its worst cell."""
    rows = []
    for one in found:
        at = ", ".join(f"{f}={level_text(v, f)}" for f, v in zip(one.factors, one.at, strict=True))
        departure = [*_estimate(one.departure), str(one.groups)]
        rows.append(Row([" × ".join(one.factors), at, *departure]))
    columns = [*words("Factors", "At"), *numbers("Departure (nats)", *_ESTIMATE)]
    return Table("interactions", "Largest departure from additivity", columns, rows)


def telemetry_table(telemetry: Sequence[CurveRow]) -> Table:
    """Return each arm, wire and parameter class: its measures averaged over steps and seeds."""
    rows = [
        Row(
            [of["arm"], of["wire"], of["param_class"]]
            + [number(of.get(name), ".6f" if name == "cosine" else ".3g") for name in MEASURES],
            of["arm"],
        )
        for of in telemetry
        if of["step"] == 0
    ]
    columns = [*words("Arm", "Wire", "Parameters"), *numbers(*MEASURES)]
    return Table("telemetry", "Codec errors, mean over training and seeds", columns, rows)


def differences_table(result: StudyResult, appendix: Appendix) -> Table:
    """Return what an arm's config has that its baseline's has not."""
    rows = []
    for arm in result.arms:
        changed = appendix.differences(arm)
        texts = [f"{key}: {value} (baseline: {base})" for key, value, base in changed]
        if texts:
            rows.append(Row([arm.name, "\n".join(texts)], arm.name))
    columns = [Column("Arm"), Column("Settings that differ from the baseline's", "code")]
    return Table("differences", "Configs, arm by arm", columns, rows, sortable=False)


def commands_table(result: StudyResult, appendix: Appendix) -> Table:
    """Return how to run one seed of each arm again, after the runs that the arms start from."""
    lines = [(arm.name, appendix.command(arm)) for arm in result.arms]
    rows = [Row([f"prepare {name}", line]) for name, line in appendix.prepared().items()]
    rows += [Row([name, command], name) for name, command in lines if command]
    columns = [Column("Arm"), Column("Command", "code")]
    return Table("commands", "One seed of an arm", columns, rows, sortable=False)


def certainty_table(certainty: Certainty) -> Table:
    """Return the known intervals and p-values, one row an arm; no row without a value."""
    rows, looks = certainty.rows(), len(look_sizes(certainty.result.study)) > 1
    known = [
        i
        for i, name in enumerate(CERTAINTY_COLUMNS)
        if i and (looks or name != "Looks") and any(row[i] != NOTHING for row in rows)
    ]
    heads = [*words("Arm"), *numbers(*(CERTAINTY_COLUMNS[i] for i in known))]
    shown = [Row([row[0], *(row[i] for i in known)], row[0]) for row in rows]
    return Table("certainty", "Intervals and p-values of each gap", heads, shown)


def completions_table(result: StudyResult) -> Table:
    """Return sampled completions of each arm's last evaluation, of its first seed, where runs have
    rewards."""
    rows: list[Row] = []
    for arm in result.arms:
        found = arm.finished[0].dir / COMPLETIONS if arm.finished else None
        text = found.read_text(encoding="utf-8") if found and found.is_file() else ""
        shown = [json.loads(line) for line in text.splitlines()][-_EXAMPLES:]
        for one in shown:
            scores = ", ".join(f"{name} {value:g}" for name, value in one["rewards"].items())
            rows.append(Row([arm.name, one["prompt"], one["completion"], scores], arm.name))
    columns = words("Arm", "Prompt", "Completion", "Rewards")
    return Table("completions", "Held-out prompts, completions sampled last", columns, rows)


def facts_table(result: StudyResult) -> Table:
    rows = [Row(fact) for fact in facts(result)]
    return Table("facts", "Of the finished runs", words("What", "Value"), rows, sortable=False)


def _estimate(e: Estimate) -> list[str]:
    return [signed(e.mean), signed(e.low), signed(e.high), str(e.seeds)]


def run_links(root: Path, runs: Mapping[int, Run]) -> Links:
    """Return each run's folder, seen from `root`, and its page in wandb where it has one."""
    pairs = []
    for seed, run in sorted(runs.items()):
        folder = Path(os.path.relpath(run.dir, root)).as_posix()
        pairs.append((f"{seed}", f"{quote(folder)}/"))
        url = str(read_state(run.dir / STATE).get("url") or "")
        pairs += [(f"{seed} in wandb", url)] if url.startswith(("https://", "http://")) else []
    return Links(pairs)


# ---------------------------------------------------------------------- words

LONE = (
    "With one seed an arm nothing is tested. A gap inside the noise band shows nothing. Without a "
)
LONE += "band the size of the noise is unknown."


def opening(result: StudyResult) -> Terms:
    """Return the first lines: baseline, margin, stopping rule, controls."""
    study = result.study
    margin = f"±{study.margin_text}"
    if result.margin is not None:
        margin += f", here {margin_nats(result)}"
    controls = [control.text for control in result.controls]
    lone = one_seed(result)
    lines = [
        ("What it shows", LONE if lone else ""),
        ("Baseline", _baseline(result)),
        ("Start", _start(result)),
        ("Margin", f"{margin}. The study treats a gap inside it as negligible."),
        ("Noise band", band_widths(result) if lone else ""),
        ("Intervals", "" if lone else f"Gaps have intervals {interval_line(result)}."),
        ("Stopping rule", _stopping(result)),
        (
            "Controls",
            " ".join(controls) or "None, so nothing shows that this study can detect a gap.",
        ),
    ]
    wrong = ["Controls"] if any(c.wrong for c in result.controls) else []
    return Terms([(what, text) for what, text in lines if text], wrong)


def _baseline(result: StudyResult) -> str:
    describe, others = result.baseline.arm.describe, result.other_baselines
    text = f"{result.study.baseline}{f' ({describe})' if describe else ''}"
    repeats = [arm.name for arm in result.arms if arm.arm.role == "baseline_repeat"]
    if repeats:
        text += "; gaps are from the mean of each seed's baseline and its repeats, "
        text += ", ".join(repeats)
    return f"{text}; other levels have their own: {', '.join(others)}." if others else f"{text}."


def _start(result: StudyResult) -> str:
    """What the arms go on from; "" where a study prepares no run."""
    study = result.study
    names = ", ".join(one.name for one in study.prepare)
    if not names:
        return ""
    taken = "state" if study.branch and study.branch.optimizer else "weights"
    return (
        f"the {taken} of runs made first: {names}. Gaps and intervals hold for these first weights "
        "alone."
    )


def _stopping(result: StudyResult) -> str:
    study = result.study
    seeds = ", ".join(map(str, study.seeds))
    if study.max_seeds <= len(study.seeds):
        return f"fixed beforehand: {_count(len(study.seeds))} an arm ({seeds})."
    return (
        f"{_count(len(study.seeds))} an arm ({seeds}), then {study.seeds_per_look} more at a time "
        "for arms whose gap is shown neither inside nor beyond the margin, at most "
        f"{study.max_seeds}. Tests and intervals are corrected for the looks in between."
    )


def decision(result: StudyResult) -> list[str]:
    """Return how the question is decided, as sentences."""
    lone = "These tests need two seeds or more. With one, as here, every finished arm is undecided."
    return [
        f"{_seed(result)} The gap of a seed is an arm's held-out loss after the last step minus "
        "that of its baseline with the same seed.",
        "On par: two one-sided paired tests show that the mean gap lies inside the margin. "
        f"{MARK}: the two-sided paired test also excludes 0. Worse or better: a two-sided test "
        "excludes everything up to the margin. Size open: 0 is excluded, but the gap is shown "
        "neither inside nor beyond the margin. Undecided: nothing is shown. More seeds would "
        "decide the last two.",
        "The interval of a verdict has the level of its test, corrected for looks and arms. It "
        "lies wholly beyond the margin for worse and better, wholly inside it for on par, and "
        "excludes 0 where the test does. Where that level would show more than the verdict claims, "
        "the interval is widened.",
        "Tests and intervals cover other seeds and other held-out documents. The variance of a "
        "mean gap has a part from the seeds and a part from the documents, which all seeds share. "
        "Where runs did not record losses by document, it is from the seeds alone.",
        *([lone] if one_seed(result) else []),
        f"An arm with losses over fewer than {LEAST_HELDOUT:,} held-out tokens is not judged: they "
        "are too few to represent other text.",
        "Only finished runs count. A stopped or failed run enters no verdict, gap or mean; curves "
        "over training show it as far as it came.",
    ]


def _seed(result: StudyResult) -> str:
    """What differs between two seeds: where all runs are given their weights, not these."""
    if result.runs and all(given(run) for run in result.runs):
        return (
            "All seeds start from the same given weights; a seed fixes every batch and all other "
            "random draws."
        )
    return "A seed fixes the initialization and every batch."


def effect_notes(effects: Sequence[MainEffect]) -> list[str]:
    """Return what a main effect could not use, one sentence a factor."""
    return [
        f"{effect.factor}: no arms that differ in this factor alone for "
        f"{', '.join(level_text(level, effect.factor) for level in effect.left_out)}; these are "
        "shown as dots."
        for effect in effects
        if effect.left_out
    ]


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"
