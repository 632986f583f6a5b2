"""From run folders to one verdict an arm, by the paired gaps of its seeds and a margin in nats.

- **on par**, **worse**, **better**, **undecided** and what lies between: `claims.py` has the rule.
  Inside the margin is what two one-sided tests show (Schuirmann 1987, J. Pharmacokinet. Biopharm.
  15; Lakens 2017, Soc. Psychol. Personal. Sci. 8). Worse and better take the two-sided test against
  the margin's nearer edge. Where the size is open, the text says how many seeds would show it.
- **not judged**: a run of a pair was evaluated on fewer than `LEAST_HELDOUT` held-out tokens.
- **diverged**: the loss of a seed was lost where the baseline's was not.
- **failed**: no pair of finished runs, and a run of the arm failed.
- **no baseline**: runs of the arm finished, their baseline's have not.
- **unfinished**: runs of the arm began, and none has ended by itself.
- **not run**: no run of the arm was ever started.

Only finished runs count: others enter no verdict, gap, mean or share of bytes.

p-values are corrected for a study's looks, then for the number of arms (`families.py`). Controls
whose verdict is known before are corrected for looks only. `Gap.interval` is corrected for looks
(Jennison & Turnbull 1989, J. R. Stat. Soc. B 51), and not for the number of arms; `Gap.deciding`
has the level of the test behind the verdict. Tests and intervals cover seeds and held-out documents
together (`stats.py`, `documents.py`).

The margin is a share of the baseline's mean loss over the study's first seeds, so that later seeds
cannot move it. With rewards (`points`) failures of prompts stand in the place of nats of documents,
and the margin is absolute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean

from zpp_lab.config.schema import FEW_HELDOUT, LEAST_HELDOUT, heldout_notes, more_heldout
from zpp_lab.config.study import CONTROLS, PREPARE, ArmConfig, CompositeConfig, StudyConfig
from zpp_lab.files import CONFIG, STUDY_FILE, below
from zpp_lab.runs.reader import (
    NOT_JUDGED,
    Run,
    failures,
    find_runs,
    read_run,
    read_study,
    standing,
    unfinished_text,
)
from zpp_lab.study.judge import claims, stats
from zpp_lab.study.judge.arms import study_of
from zpp_lab.study.judge.documents import DocumentGaps, Reader, combined
from zpp_lab.study.judge.families import Entry, PValues, look_sizes, nominal_level, planned_seeds
from zpp_lab.study.judge.families import replay as replay_looks
from zpp_lab.study.judge.stats import Gap

MOST_PAIRED = 12


def seed_notes(study: StudyConfig, result: ArmResult) -> list[str]:
    """Describe the runs that have not finished; seeds with the same end share a sentence."""
    fates: dict[str, list[int]] = {}
    for seed in sorted({*study.seeds, *result.runs}):
        run = result.runs.get(seed)
        if run is None or run.outcome != "finished":
            fates.setdefault(unfinished_text(run), []).append(seed)
    notes = []
    for seeds in fates.values():
        several = len(seeds) > 1
        named = f"{'seeds' if several else 'seed'} {', '.join(map(str, seeds))}"
        end = unfinished_text(result.runs.get(seeds[0]), several)
        notes.append(f"{result.name}: {named} {end}.")
    return notes


@dataclass(frozen=True)
class ArmResult:
    """One arm: its runs by seed, its gaps by seed (nats), and what they say."""

    arm: ArmConfig
    runs: Mapping[int, Run]
    verdict: str
    note: str = ""
    gaps: Mapping[int, float] = field(default_factory=dict)
    gap: Gap | None = None
    heldout_loss: float | None = None  # mean of the finished runs, nats per token
    bytes_total: float | None = None  # bytes a step as a fraction of the baseline's
    bytes_inter: float | None = None  # the same, between nodes only
    margin: float | None = None  # nats; of the baseline that this arm is paired with
    tests: PValues = field(default_factory=PValues)  # p-values, plain and corrected
    documents: DocumentGaps | None = None  # the gaps by held-out document, where runs tell them

    def __repr__(self) -> str:
        return f"ArmResult({self.name!r}, {self.text!r}, runs={len(self.runs)})"

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def text(self) -> str:
        return f"{self.verdict} ({self.note})" if self.note else self.verdict

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs.values() if run.outcome == "finished"]

    @property
    def first_run(self) -> Run | None:
        """The run of the lowest seed that has a config: what the arm's settings are read from."""
        return next((run for _, run in sorted(self.runs.items()) if run.config), None)


@dataclass(frozen=True)
class StudyResult:
    """All arms in the study's order, with the margin in nats (None before any baseline has run)."""

    study: StudyConfig
    arms: Sequence[ArmResult]
    margin: float | None
    notes: Sequence[str] = ()
    composites: Sequence[ArmResult] = ()  # without runs; gaps are their arms' means

    def __repr__(self) -> str:
        counts = f"runs={len(self.runs)}, arms={len(self.arms)}, verdicts={len(self.every)}"
        return f"StudyResult({self.study.name!r}, {counts})"

    @property
    def every(self) -> list[ArmResult]:
        """The arms, then the composites: what has a row in a table of verdicts."""
        return [*self.arms, *self.composites]

    @property
    def ranked(self) -> list[ArmResult]:
        """`every`, each baseline before its arms by gap and its controls; composites last."""
        names = [arm.name for arm in self.arms]

        def place(arm: ArmResult) -> tuple[int, int, bool, float]:
            own = arm.verdict == "baseline"
            kind = 0 if own else 2 if arm.arm.role in CONTROLS else 1
            alone = own and arm.arm.role != "baseline_repeat"
            base = names.index(arm.name if alone else self.baseline_of(arm).name)
            return base, kind, arm.gap is None, arm.gap.mean if arm.gap else 0.0

        return [*sorted(self.arms, key=place), *self.composites]

    @property
    def baseline(self) -> ArmResult:
        return next(a for a in self.arms if a.name == self.study.baseline)

    @property
    def runs(self) -> list[Run]:
        """Every run, by arm in the study's order, then by seed."""
        return [run for arm in self.arms for _, run in sorted(arm.runs.items())]

    @property
    def controls(self) -> list[claims.Control]:
        """The arms of a control's role, in the study's order."""
        return [
            claims.Control(arm.name, arm.arm.role, arm.verdict, _lone_gap(arm))
            for arm in self.arms
            if arm.arm.role in CONTROLS
        ]

    def baseline_of(self, arm: ArmResult) -> ArmResult:
        """Return the arm that `arm` is paired with."""
        name = arm.arm.against or self.study.baseline
        return next(a for a in self.arms if a.name == name)

    def base_runs(self, arm: ArmResult, seed: int) -> list[Run]:
        """Return one seed's finished baseline runs, whose mean a gap of `arm` is taken from."""
        runs = {one.name: one.runs for one in self.arms}
        return _finished([runs[name] for name in self.study.bases(arm.arm)], seed)

    def readout_gap(self, arm: ArmResult) -> Gap | None:
        """Return the gap of the training loss over the last steps (`train.readout_steps`), in nats,
        paired as the held-out one: a second look, by which no verdict goes. Its interval allows for
        looks too. None without such runs, and for a baseline."""
        gaps = []
        for seed, run in sorted(arm.runs.items()):
            own, bases = run.readout, [base.readout for base in self.base_runs(arm, seed)]
            theirs = [base[1] for base in bases if own and base and base[0] == own[0]]
            if own and bases and len(theirs) == len(bases):
                gaps.append(own[1] - fmean(theirs))
        if is_baseline(self.study, arm.arm) or not gaps:
            return None
        level = nominal_level(1 - self.study.confidence, look_sizes(self.study), 2)
        interval = stats.t_interval(gaps, 1 - level) if len(gaps) > 1 else None
        return Gap(len(gaps), fmean(gaps), interval=interval)

    @property
    def other_baselines(self) -> list[str]:
        """The arms, besides the study's baseline, that others are paired with."""
        names = dict.fromkeys(arm.arm.against for arm in self.arms if arm.arm.against)
        return [name for name in names if name != self.study.baseline]

    @property
    def compared_with(self) -> str:
        """Whom an arm is compared with, in a sentence on every arm."""
        named = "its baseline" if self.other_baselines else self.study.baseline
        repeated = any(arm.arm.role == "baseline_repeat" for arm in self.arms)
        return f"{named} and its repeats (mean)" if repeated else named


def judge_study(
    study: StudyConfig, runs: Sequence[Run], notes: Sequence[str] = (), reader: Reader | None = None
) -> StudyResult:
    """Pair every arm's finished runs with its baseline's of the same seed, and judge. reader: of
    held-out documents, where runs have no folder that holds them."""
    by_arm: dict[str, dict[int, Run]] = {arm.name: {} for arm in study.arms}
    unknown: set[str] = set()
    seeds = set(planned_seeds(study))
    for run in runs:
        if run.arm not in by_arm:
            unknown.add(run.arm)
        elif run.seed in seeds:
            by_arm[run.arm].setdefault(run.seed, run)
    reader, asked = reader or Reader(), study.composites
    arms = [_gather(study, arm, by_arm, reader) for arm in study.arms]
    by_name = {arm.name: arm for arm in arms}
    sides = [[[by_name[a.name] for a in side] for side in study.members(c)] for c in asked]
    composites = [_composite(study, c, *side) for c, side in zip(asked, sides, strict=True)]
    tests = replay_looks(study, entries(study, arms, composites)).tests
    judged = [_decide(study, a, tests.get(a.name, PValues())) for a in (*arms, *composites)]
    judged = _noted(study, judged)
    arms, composites = judged[: len(arms)], judged[len(arms) :]
    notes = [
        *notes,
        *(f"Arm {name} is not in the study; its runs are ignored." for name in sorted(unknown)),
    ]
    few = _fewest(run for arm in arms for run in arm.finished)
    found = heldout_notes(*few) if few is not None and study.points is None else ()
    notes = [*notes, *(f"{text[0].upper()}{text[1:]}." for text in found)]
    for result in arms:
        notes += seed_notes(study, result)
        notes += _data_notes(study, result, by_arm)
    return StudyResult(study, arms, _margin(study, arms), notes, composites)


def pairwise(result: StudyResult) -> list[tuple[str, str, ArmResult]]:
    """Return every two arms with one baseline: their names, and the first one's gap to the second,
    judged as gaps to the baseline are, corrected for the number of pairs. Controls are in none; of
    more than MOST_PAIRED arms there are no pairs, since corrected for so many they would show
    nothing."""
    study, known = result.study, entries(result.study, result.arms, result.composites)
    arms = [arm for arm in result.arms if arm.arm.role == "arm" and arm.verdict in claims.VERDICTS]
    pairs, family = [], {}
    for one, other in combinations(arms, 2) if len(arms) <= MOST_PAIRED else ():
        if one.arm.against == other.arm.against:
            name = f"{one.name} less {other.name}"
            undecided = [replace(arm, verdict=claims.UNDECIDED) for arm in (one, other)]
            apart = _composite(study, CompositeConfig(name, [one.name]), *([a] for a in undecided))
            pairs.append((one.name, other.name, apart))
            family[name] = _entry(apart, [known[one.name], known[other.name]])
    tests = replay_looks(study, family).tests
    return [(one, other, _decide(study, arm, tests[arm.name])) for one, other, arm in pairs]


def _margin(study: StudyConfig, arms: Sequence[ArmResult]) -> float | None:
    """The study's baseline's, or while that has not run the smallest of another baseline's."""
    own = next(arm.margin for arm in arms if arm.name == study.baseline)
    known = [arm.margin for arm in arms if arm.margin is not None]
    return own if own is not None else min(known, default=None)


def entries(
    study: StudyConfig, arms: Sequence[ArmResult], composites: Sequence[ArmResult]
) -> dict[str, Entry]:
    """Return what the tests need of arms that are no baseline, and of composites."""
    runs = {arm.name: arm.runs for arm in arms}
    found = {}
    for arm in arms:
        if not is_baseline(study, arm.arm):
            pair = [arm.runs, *(runs[name] for name in study.bases(arm.arm))]
            begun = set.intersection(*(set(one) for one in pair))
            ended = {s for s in begun if all(one[s].outcome != "unfinished" for one in pair)}
            judged = arm.verdict not in ("diverged", "failed", NOT_JUDGED)
            member = arm.arm.role not in claims.EXPECTED
            found[arm.name] = Entry(
                arm.gaps, frozenset(ended), arm.margin, member, judged, arm.documents
            )
    for one, config in zip(composites, study.composites, strict=True):
        found[one.name] = _entry(one, [found[arm.name] for arm in chain(*study.members(config))])
    return found


def _entry(composite: ArmResult, members: Sequence[Entry]) -> Entry:
    shared = frozenset.intersection(*(member.ended for member in members))
    judged = composite.verdict in claims.VERDICTS
    gaps, margin = composite.gaps, composite.margin
    return Entry(gaps, shared, margin, True, judged, composite.documents, asks=False)


def is_baseline(study: StudyConfig, arm: ArmConfig) -> bool:
    """Return whether it is a baseline, or a repeat of one."""
    return arm.name == study.baseline or arm.role in ("baseline", "baseline_repeat")


def _gather(
    study: StudyConfig, arm: ArmConfig, by_arm: Mapping[str, Mapping[int, Run]], reader: Reader
) -> ArmResult:
    """An arm's numbers, and its verdict where that follows from how its runs ended."""
    bases = [by_arm[name] for name in study.bases(arm)]
    runs, base = by_arm[arm.name], bases[0]
    first = [base[s].heldout_loss for s in study.seeds if s in base]
    losses = [loss for loss in first if loss is not None]
    margin = study.margin_of(fmean(losses)) if losses else None
    apart = _other_data(study, arm, by_arm)
    pairs = {s: (run, _finished(bases, s)) for s, run in sorted(runs.items()) if s not in apart}
    gaps = {s: gap for s, pair in pairs.items() if (gap := _paired_gap(*pair)) is not None}
    pairs = {seed: pairs[seed] for seed in gaps}
    finished = [run.heldout_loss for run in runs.values() if run.heldout_loss is not None]
    verdict, note = _outcome(study, arm, runs, base, pairs if margin else {})
    if apart and not pairs:
        verdict, note = NOT_JUDGED, f"its data differ from those of {study.bases(arm)[0]}"
    documents = None if is_baseline(study, arm) else reader.gaps(pairs)
    return ArmResult(
        arm,
        runs,
        verdict,
        note,
        gaps,
        _summary(study, gaps, margin, documents),
        fmean(finished) if finished else None,
        _fraction(runs, base, None),
        _fraction(runs, base, "inter"),
        margin,
        documents=documents,
    )


def _composite(
    study: StudyConfig,
    config: CompositeConfig,
    added: Sequence[ArmResult],
    taken_off: Sequence[ArmResult],
) -> ArmResult:
    """The mean gap of its arms, over seeds that all have; none while an arm has none."""
    members = [*added, *taken_off]
    less = f" less that of {', '.join(config.minus)}" if config.minus else ""
    describe = config.describe or f"mean gap of {', '.join(config.arms)}{less}"
    arm = ArmConfig(config.name, describe=describe, against=members[0].arm.against)
    held = next((m for m in members if m.verdict != claims.UNDECIDED), None)
    if held is not None:
        return ArmResult(arm, {}, held.verdict, held.name)
    seeds = set.intersection(*(set(m.gaps) for m in members))
    if not seeds:
        return ArmResult(arm, {}, "unfinished", "no seed has finished in all of its arms")

    def of(side: Sequence[ArmResult], seed: int) -> float:
        return fmean(m.gaps[seed] for m in side) if side else 0.0

    gaps = {seed: of(added, seed) - of(taken_off, seed) for seed in sorted(seeds)}
    margin = members[0].margin
    sides = [[m.documents for m in side] for side in (added, taken_off) if side]
    documents = combined(*sides)
    gap = _summary(study, gaps, margin, documents)
    return ArmResult(arm, {}, claims.UNDECIDED, "", gaps, gap, margin=margin, documents=documents)


def _summary(
    study: StudyConfig,
    gaps: Mapping[int, float],
    margin: float | None,
    documents: DocumentGaps | None,
) -> Gap | None:
    """Intervals that hold whenever the study stops."""
    if not gaps or not margin:
        return None
    sizes, alpha = look_sizes(study), 1 - study.confidence
    return stats.summarize(
        list(gaps.values()),
        margin,
        1 - nominal_level(alpha, sizes, 2),
        documents.part(gaps) if documents else None,
    )


def _outcome(
    study: StudyConfig,
    arm: ArmConfig,
    runs: Mapping[int, Run],
    base: Mapping[int, Run],
    pairs: Mapping[int, tuple[Run, Sequence[Run]]],
) -> tuple[str, str]:
    """(verdict, note) as far as outcomes tell it; undecided where the gaps will."""
    outcomes = {seed: run.outcome for seed, run in runs.items()}
    diverged = [
        seed
        for seed, outcome in outcomes.items()
        if outcome == "diverged" and (seed not in base or base[seed].outcome != "diverged")
    ]
    failed = [run for run in runs.values() if run.outcome not in ("finished", "unfinished")]
    if is_baseline(study, arm):
        if "finished" in outcomes.values():
            repeats = arm.role == "baseline_repeat"
            return "baseline", f"repeats {arm.against or study.baseline}" if repeats else ""
    elif diverged:
        return "diverged", f"{len(diverged)} of {max(len(study.seeds), len(runs))} seeds"
    elif pairs:
        few = _fewest(run for own, theirs in pairs.values() for run in (own, *theirs))
        if few is None or few[0] >= LEAST_HELDOUT:
            return claims.UNDECIDED, ""
        least = f"{few[0]:,} held-out tokens, below the minimum of {LEAST_HELDOUT:,}"
        more = "hold out more prompts (data.heldout_every, more records)"
        return NOT_JUDGED, f"{least}: {more_heldout(few[1]) if study.points is None else more}"
    if failed:
        return "failed", failures(failed)
    if "finished" in outcomes.values():
        return "no baseline", "its baseline has not finished"
    if runs:
        return "unfinished", standing(runs, study.seeds)
    return "not run", "never started"


def _fewest(runs: Iterable[Run]) -> tuple[int, int] | None:
    """(held-out tokens, train.eval_tokens) of the run with the fewest; None where none is known."""
    known = [
        (run.heldout_tokens, int((run.config.get("train") or {}).get("eval_tokens", FEW_HELDOUT)))
        for run in runs
        if run.heldout_tokens is not None
    ]
    return min(known, default=None)


def _lone_gap(arm: ArmResult) -> float | None:
    """The gap of an arm's only pair of runs, in nats; None where there are more, or none."""
    lone = arm.verdict == claims.UNDECIDED and arm.gap is not None and arm.gap.n == 1
    return next(iter(arm.gaps.values())) if lone else None


def _decide(study: StudyConfig, arm: ArmResult, tests: PValues) -> ArmResult:
    if arm.verdict != claims.UNDECIDED or arm.gap is None:
        return replace(arm, tests=tests)
    verdict = claims.verdict_of(arm.gap.mean, tests, study.confidence)
    gap, level = arm.gap, claims.deciding_level(verdict, arm.gap, tests)
    if level is not None:
        deciding = stats.t_interval(list(arm.gaps.values()), 1 - level, gap.documents)
        gap = replace(gap, deciding=deciding, level=level)
    return replace(arm, tests=tests, verdict=verdict, gap=gap)


def _noted(study: StudyConfig, arms: Sequence[ArmResult]) -> list[ArmResult]:
    """Undecided arms say how many seeds they need, those of open size how many tell the size; at
    the level that is left for each of them."""
    waiting = sum(
        arm.verdict in claims.OPEN and arm.arm.role not in claims.EXPECTED for arm in arms
    )
    alpha = (1 - study.confidence) / max(1, waiting)
    level = 1 - nominal_level(alpha, look_sizes(study), 2)
    return [
        replace(arm, note=_needs(arm, level)) if arm.verdict in claims.OPEN else arm for arm in arms
    ]


def _needs(arm: ArmResult, confidence: float) -> str:
    if arm.gap is None or arm.margin is None or arm.gap.interval is None:
        return "one seed"
    edge = 0.0 if arm.verdict == claims.UNDECIDED else arm.margin
    needed = stats.seeds_to_decide(arm.gap, arm.margin, confidence, edge)
    alone = replace(arm.gap, documents=None)
    if not needed and stats.seeds_to_decide(alone, arm.margin, confidence, edge):
        return "needs more held-out documents"
    return f"needs about {needed or f'more than {stats.MAX_SEEDS}'} seeds"


def _finished(bases: Sequence[Mapping[int, Run]], seed: int) -> list[Run]:
    """The runs of one seed that have a held-out loss; none where the first base's has not. A repeat
    of that which read other data is left out."""
    runs = [base[seed] for base in bases if seed in base]
    known = [run for run in runs if run.heldout_loss is not None]
    if not known or known[0] is not bases[0].get(seed):
        return []
    return [run for run in known if not _apart(run, known[0])]


def _other_data(
    study: StudyConfig, arm: ArmConfig, by_arm: Mapping[str, Mapping[int, Run]]
) -> dict[int, tuple[str, str]]:
    """By seed, both hashes where an arm's run read other data than its baseline's."""
    base, found = by_arm[study.bases(arm)[0]], {}
    for seed, run in by_arm[arm.name].items():
        if seed in base and (hashes := _apart(run, base[seed])):
            found[seed] = hashes
    return found


def _apart(run: Run, base: Run) -> tuple[str, str] | None:
    """Both hashes where it is known that the two read other data."""
    own, theirs = run.data_hash, base.data_hash
    return (own, theirs) if own and theirs and own != theirs else None


def _data_notes(
    study: StudyConfig, result: ArmResult, by_arm: Mapping[str, Mapping[int, Run]]
) -> list[str]:
    apart = _other_data(study, result.arm, by_arm)
    if not apart:
        return []
    own, theirs = next(iter(apart.values()))
    seeds = f"{'seeds' if len(apart) > 1 else 'seed'} {', '.join(map(str, sorted(apart)))}"
    return [
        f"{result.name}: {seeds} read other data than {study.bases(result.arm)[0]} "
        f"({own[:8]} for {theirs[:8]}) and {'are' if len(apart) > 1 else 'is'} left out; "
        "train one of the two again, into another folder."
    ]


def _paired_gap(run: Run, bases: Sequence[Run]) -> float | None:
    losses = [loss for base in bases if (loss := base.heldout_loss) is not None]
    return run.heldout_loss - fmean(losses) if losses and run.heldout_loss is not None else None


def _fraction(runs: Mapping[int, Run], base: Mapping[int, Run], hop: str | None) -> float | None:
    """Mean bytes a step over the baseline's; None when either is unknown or nothing is sent."""
    mine, theirs = (
        [b for run in side.values() if (b := run.bytes_per_step(hop)) is not None]
        for side in (runs, base)
    )
    if not mine or not theirs or fmean(theirs) == 0:
        return None
    return fmean(mine) / fmean(theirs)


def read_result(root: Path, study: StudyConfig | None = None) -> StudyResult:
    """Return the verdicts of the runs at and below `root`.

    study: None takes the study that `root` was run as, and for plain runs one arm a recipe.
    Raises ValueError when there are no runs or one cannot be read.
    """
    runs = find_runs(root)
    study = study or read_study(root)
    if study is not None:
        return judge_study(study, runs, _prepare_notes(root, study))
    if not runs:
        raise ValueError(
            f"{root}: no runs in or below it (none has a config.yaml); run something first, or "
            f"name another folder{below(root.resolve().parent, STUDY_FILE)}"
        )
    return judge_study(*study_of(root.resolve().name, runs))


def _prepare_notes(root: Path, study: StudyConfig) -> list[str]:
    """Sentences on the runs that no arm can start without, where they have not finished."""
    notes = []
    for one in study.prepare:
        folder = root / PREPARE / one.name
        run = read_run(folder) if (folder / CONFIG).is_file() else None
        if run is None or run.outcome != "finished":
            notes.append(f"{PREPARE} {one.name}, which arms start from, {unfinished_text(run)}.")
    return notes
