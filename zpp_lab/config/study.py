"""Every setting of a study as frozen dataclasses, validated when they are built."""

from __future__ import annotations

from dataclasses import field
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import STRICT as _STRICT
from zpp_lab.config.codec import AboveZero, Count, Positive
from zpp_lab.config.codec import need as _need
from zpp_lab.files import check_name

Role = Literal[
    "baseline", "baseline_repeat", "arm", "negative_control", "order_control", "sham_control"
]
CONTROLS: tuple[Role, ...] = ("negative_control", "order_control", "sham_control")
PREPARE = "prepare"  # the folder of the runs that arms start from
NOT_RUNS = frozenset({"checkpoints", "wandb", "figures", PREPARE})  # folders next to runs
Level = str | int | float | bool | None  # of a factor


@dataclass(frozen=True, config=_STRICT)
class ArmConfig:
    """One recipe in a study: its name and the Hydra overrides that make it.

    Where the baseline differs by level (model size, ranks), each level has an arm of role
    `baseline`, and the other arms of that level say in `against` which one they are paired with.

    `baseline_repeat`: a run of that baseline in another order of sums (runs of one order are equal
    to the bit), such as `recipe=zero3_reordered`, or half of train.batch_size and twice
    train.micro_steps. Gaps of a seed are taken from the mean of the baseline and its repeats. An
    order control is another order still, and no part of that mean.

    `sham_control` (noise control): noise of a codec's size in the codec's place, for the whole run
    or some steps (`recipe=zero3_nudged`). It shows whether a gap is the noise's size; its verdict
    is not known before, so it is judged as arms are, and never advised.
    """

    name: str
    overrides: list[str] = field(default_factory=list)
    describe: str = ""
    role: Role = "arm"
    against: str | None = None  # the arm that this one is paired with; None: the study's baseline
    factors: dict[str, Level] = field(default_factory=dict)  # what this arm's place in a grid is
    start: str | None = None  # the prepared run it starts from; None: the study's only one


@dataclass(frozen=True, config=_STRICT)
class PrepareConfig:
    """A run before a study's arms, which start from its weights. `overrides` follow the study's."""

    name: str
    overrides: list[str] = field(default_factory=list)
    seed: int = 1


@dataclass(frozen=True, config=_STRICT)
class BranchConfig:
    """Arms that continue from the state of the prepared run that they start from, their base run.
    Each anneals in its own order of data, that of its seed: the rate falls from train.lr to 0 in a
    straight line over `steps`. Arms may set otherwise."""

    steps: Positive
    optimizer: bool = True  # false: the trunk's weights, and a new optimizer

    @property
    def overrides(self) -> list[str]:
        return [
            f"model.start_optimizer={str(self.optimizer).lower()}",
            f"train.steps={self.steps}",
            "train.schedule=linear",
            "train.warmup_steps=0",
            "train.min_lr_ratio=0",
        ]


@dataclass(frozen=True, config=_STRICT)
class CompositeConfig:
    """A question about several arms at once, asked before the study runs: the mean of their gaps of
    each seed, less that of the arms in `minus`. It is judged like an arm. arms, minus: names, or
    patterns such as w4_* for arms that are neither baselines nor controls."""

    name: str
    arms: list[str]
    minus: list[str] = field(default_factory=list)
    describe: str = ""


@dataclass(frozen=True, config=_STRICT)
class StudyConfig:
    """Arms × seeds with a question. Lives in conf/study/NAME.yaml."""

    name: str
    question: str
    arms: list[ArmConfig]
    seeds: list[int]
    overrides: list[str] = field(default_factory=list)  # for every arm
    prepare: list[PrepareConfig] = field(default_factory=list)  # runs before the arms
    branch: BranchConfig | None = None  # how arms go on from those
    composites: list[CompositeConfig] = field(default_factory=list)
    baseline: str = "zero3"
    margin: AboveZero = 0.0025  # of the baseline's held-out loss
    # task=rl, in its place: points of success, 5 for a share of failures of 0.05
    points: Annotated[float, Field(gt=0, lt=100)] | None = None
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    jobs: Count = 0  # runs side by side; 0: as many as the machine has cores or GPUs
    runs_per_gpu: Count = 1  # runs that share a GPU; 0: as many as fit by the first run's memory
    retries: Count = 2  # new starts of a run that crashed or ran out of memory
    max_seeds: Count = 0  # added until every gap is inside or beyond the margin; 0: never
    seeds_per_look: Positive = 1  # so many at a time

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        twice = sorted({n for n in names if names.count(n) > 1})
        _need(not twice, f"study {self.name}: arm named twice: {', '.join(twice)}")
        _need(
            self.baseline in names,
            f"study {self.name}: baseline {self.baseline!r}: unknown arm; valid names: "
            f"{', '.join(names)}",
        )
        distinct = len(set(self.seeds)) == len(self.seeds) > 0
        _need(distinct, f"study {self.name}: seeds={self.seeds}: use one or more, all different")
        self._check_pairs()
        self._check_starts()
        self._check_branch()
        self._check_composites()

    def margin_of(self, loss: float) -> float:
        """Return the margin beside a baseline of this held-out loss, or share of failures."""
        return self.margin * loss if self.points is None else self.points / 100

    @property
    def margin_text(self) -> str:
        if self.points is not None:
            return f"{self.points:g} points of success"
        return f"{self.margin:.2%} of the baseline's held-out loss"

    @property
    def start_overrides(self) -> list[str]:
        """What arms that start from a prepared run set besides `model.start`; before their own."""
        return self.branch.overrides if self.branch else []

    def members(self, composite: CompositeConfig) -> tuple[list[ArmConfig], list[ArmConfig]]:
        """Return the arms of a composite and those of its `minus`, in the study's order."""

        def named(patterns: list[str]) -> list[ArmConfig]:
            return [arm for arm in self.arms if any(self._names(p, arm) for p in patterns)]

        return named(composite.arms), named(composite.minus)

    def _names(self, pattern: str, arm: ArmConfig) -> bool:
        ordinary = arm.role == "arm" and arm.name != self.baseline
        return pattern == arm.name or (ordinary and fnmatchcase(arm.name, pattern))

    def check_folders(self) -> None:
        """ValueError where a name cannot be a folder's: the study's below runs/, its arms' below
        the study's. Not for every study: plain runs that a report groups have other names."""
        named = [("", self.name), *(("arm", arm.name) for arm in self.arms)]
        for what, name in [*named, *(("prepare", one.name) for one in self.prepare)]:
            whose = f"study {self.name!r}{f', {what} {name!r}' if what else ''}"
            try:
                check_name(name)
            except ValueError as error:
                raise ValueError(f"{whose}: {error}") from None
            _need(
                what != "arm" or name not in NOT_RUNS,
                f"{whose}: this name is reserved for another folder; use none of "
                f"{', '.join(sorted(NOT_RUNS))}",
            )

    def _check_starts(self) -> None:
        known = [one.name for one in self.prepare]
        _need(
            len(set(known)) == len(known),
            f"study {self.name}: two prepared runs have the same name; rename one",
        )
        for arm in self.arms:
            _need(
                arm.start in known or (arm.start is None and len(known) < 2),
                f"study {self.name}, arm {arm.name}: start={arm.start!r}: unknown prepared run; "
                f"valid names: {', '.join(known) or 'none'}",
            )

    def _check_branch(self) -> None:
        if self.branch is None:
            return
        _need(bool(self.prepare), f"study {self.name}: branch needs a run under prepare")
        last = max(self.seeds) + max(0, self.max_seeds - len(self.seeds))
        for one in self.prepare:
            _need(
                one.seed not in self.seeds and not max(self.seeds) < one.seed <= last,
                f"study {self.name}: prepare {one.name} has seed {one.seed}, like a run of its "
                "arms, so that continuation would read its base run's first batches again. Use a "
                "seed that no arm has, such as 0",
            )

    def bases(self, arm: ArmConfig) -> list[str]:
        """Return the arms that `arm` is paired with, by the mean of their losses: a baseline, then
        its repeats. A repeat is paired with the baseline alone, and a baseline with itself."""
        if arm.role == "baseline" or arm.name == self.baseline:
            return [arm.name]
        own, repeats = arm.against or self.baseline, [a for a in self.arms if _repeats(a)]
        same = [a.name for a in repeats if (a.against or self.baseline) == own]
        return [own] if _repeats(arm) else [own, *same]

    def _check_composites(self) -> None:
        taken = {arm.name for arm in self.arms}
        bases = {arm.name for arm in self.arms if arm.role.startswith("baseline")} | {self.baseline}
        for one in self.composites:
            whose = f"study {self.name}, composite {one.name}"
            _need(
                one.name not in taken,
                f"{whose}: an arm or a composite has this name already; rename one",
            )
            taken.add(one.name)
            for pattern in [*one.arms, *one.minus]:
                found = any(self._names(pattern, arm) for arm in self.arms)
                _need(found, f"{whose}: no arm matches {pattern!r}; use a name, or a pattern")
            added, taken_off = self.members(one)
            _need(bool(added), f"{whose}: arms is empty; give names, or patterns such as w4_*")
            both = [arm.name for arm in added if arm in taken_off]
            both += [arm.name for arm in [*added, *taken_off] if arm.name in bases]
            _need(
                not both,
                f"{whose}: {', '.join(both)}: is a baseline, or in both arms and "
                "minus; remove it from one",
            )
            _need(
                len({arm.against for arm in [*added, *taken_off]}) == 1,
                f"{whose}: its arms have different baselines; choose arms with one baseline",
            )

    def _check_pairs(self) -> None:
        bases = {arm.name for arm in self.arms if arm.role == "baseline"} | {self.baseline}
        _need(
            self.baseline not in [arm.name for arm in self.arms if arm.role == "baseline_repeat"],
            f"study {self.name}: baseline {self.baseline} has role baseline_repeat: give that "
            "role to another arm",
        )
        for arm in self.arms:
            _need(
                arm.against in (None, *bases),
                f"study {self.name}, arm {arm.name}: against={arm.against!r}: not an arm of role "
                f"baseline; valid names: {', '.join(sorted(bases))}",
            )


def _repeats(arm: ArmConfig) -> bool:
    return arm.role == "baseline_repeat"
