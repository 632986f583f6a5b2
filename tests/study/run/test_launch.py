from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.study.fake_trainer import STEPS, fake_compose
from tests.waiting import until
from zpp_lab.config.study import ArmConfig, CompositeConfig, Role, StudyConfig
from zpp_lab.runs.reader import find_runs, read_study
from zpp_lab.study.run.attempts import StudyOutcome
from zpp_lab.study.run.launch import Launch, run_study
from zpp_lab.study.run.plan import Planner, some_arms

ENTRY = "tests.study.fake_trainer:run"


def study(*arms: str, seeds: int = 2) -> StudyConfig:
    return StudyConfig(
        name="test",
        question="Does it hold?",
        arms=[ArmConfig(arm, [f"recipe.exempt.below_numel={i}"]) for i, arm in enumerate(arms)],
        seeds=list(range(1, seeds + 1)),
    )


def launch(
    what: StudyConfig, root: Path, jobs: int = 2, retry: bool = False
) -> tuple[StudyOutcome, str]:
    out = io.StringIO()
    outcome = run_study(
        what, root, Launch(jobs), retry=retry, compose=fake_compose, entry=ENTRY, stream=out
    )
    return outcome, out.getvalue()


def started(root: Path) -> list[str]:
    return (root / "started.txt").read_text().splitlines()


def test_runs_every_arm_and_seed_baseline_first(tmp_path: Path) -> None:
    outcome, text = launch(study("a", "zero3", "b"), tmp_path, jobs=1)
    assert outcome.exit_code == 0
    assert len(outcome.finished) == 6
    assert started(tmp_path) == ["zero3 1", "zero3 2", "a 1", "b 1", "a 2", "b 2"]
    assert "[3/6] a seed 1: held-out loss 2.5100" in text
    said = f"\nzero3, a, b: train.warmup_steps=20 is more than train.steps={STEPS}: "
    assert text.count(said) == 1  # and no error: what is tried in a few steps keeps its warm-up
    assert "hello from a" in (tmp_path / "a" / "seed2" / "log.txt").read_text()
    assert [run.outcome for run in find_runs(tmp_path)] == ["finished"] * 6
    assert read_study(tmp_path) == study("a", "zero3", "b")


def test_finished_runs_are_skipped_and_new_seeds_added(tmp_path: Path) -> None:
    launch(study("zero3", "a"), tmp_path)
    before = started(tmp_path)
    outcome, _ = launch(study("zero3", "a"), tmp_path)
    assert (len(outcome.skipped), len(outcome.finished), outcome.exit_code) == (4, 0, 0)
    assert started(tmp_path) == before
    outcome, _ = launch(study("zero3", "a", seeds=3), tmp_path)
    assert sorted(outcome.finished) == ["a seed 3", "zero3 seed 3"]


def test_failures_are_named_do_not_stop_others_and_are_retried(tmp_path: Path) -> None:
    what = study("zero3", "raises", "killed", "exits", "silent", "diverges", "last", seeds=1)
    outcome, text = launch(what, tmp_path)
    assert outcome.exit_code == 1
    assert outcome.finished == ["zero3 seed 1", "last seed 1"]
    assert outcome.failed == [f"{a} seed 1" for a in ("raises", "killed", "exits", "silent")]
    assert outcome.diverged == ["diverges seed 1"]
    for end in (
        "raises seed 1: crashed before step 1 of 4 (RuntimeError: the weights are gone)",
        "killed seed 1: crashed before step 1 of 4 (the process was killed by SIGKILL",
        "diverges seed 1: diverged before step 1 of 4 (loss is NaN)",
    ):
        assert f"  {end}" in outcome.message
    assert outcome.message in text

    failures = {run.arm: run.failure for run in find_runs(tmp_path) if run.failure}
    assert "SIGKILL" in failures["killed"]["error"]
    assert "exit code 3" in failures["exits"]["error"]
    assert "exit code 0" in failures["silent"]["error"]
    assert "the weights are gone" in failures["raises"]["traceback"]
    assert failures["diverges"]["outcome"] == "diverged"
    assert started(tmp_path).count("killed 1") == 2  # once more at the end
    assert started(tmp_path).count("raises 1") == 1

    (tmp_path / "healed").touch()
    outcome, text = launch(what, tmp_path)
    assert "4 failed and are repeated, 1 diverged" in text
    assert (outcome.exit_code, len(outcome.finished)) == (0, 4)
    assert outcome.diverged == ["diverges seed 1"]
    outcome, _ = launch(what, tmp_path, retry=True)
    assert outcome.finished == ["diverges seed 1"]
    assert not any(run.failure for run in find_runs(tmp_path))


def test_crashes_are_tried_again_until_the_cap(tmp_path: Path) -> None:
    what = study("zero3", "raises", seeds=1)
    for call in (1, 2, 3, 4):
        outcome, text = launch(what, tmp_path)
        assert outcome.failed == ["raises seed 1"]
        assert outcome.exit_code == 1
        assert (outcome.given_up == ["raises seed 1"]) is (call >= 3)
        assert started(tmp_path).count("raises 1") == min(call, 3)
    assert "1 diverged or failed for good (--retry)" in text
    launch(what, tmp_path, retry=True)
    assert started(tmp_path).count("raises 1") == 4


def test_seeds_are_added_to_the_arms_that_are_undecided(tmp_path: Path) -> None:
    what = StudyConfig(**{**vars(study("zero3", "same", "noisy")), "max_seeds": 4})
    outcome, text = launch(what, tmp_path)
    assert outcome.exit_code == 0
    added = [name for name in outcome.finished if name[-1] in "34"]
    assert sorted(added) == ["noisy seed 3", "noisy seed 4", "zero3 seed 3", "zero3 seed 4"]
    assert "Still undecided: 2 more runs (zero3 seed 3; noisy seed 3)" in text
    before = started(tmp_path)
    outcome, _ = launch(what, tmp_path)
    assert started(tmp_path) == before
    (tmp_path / "noisy" / "seed4" / "summary.json").unlink()  # killed just before its end
    outcome, _ = launch(what, tmp_path)
    assert outcome.finished == ["noisy seed 4"]


def test_arms_that_are_the_same_are_an_error(tmp_path: Path) -> None:
    arms = [ArmConfig("zero3"), ArmConfig("b", ["recipe.name=other", "engine.threads=2"])]
    what = StudyConfig(name="t", question="?", arms=arms, seeds=[1])
    with pytest.raises(ValueError, match="zero3 and b"):
        launch(what, tmp_path)


@pytest.mark.parametrize("role", ["order_control", "baseline_repeat"])
@pytest.mark.parametrize(
    ("shape", "hops", "refused"),
    [
        ((2, 1), 1, True),
        ((1, 2), 1, True),
        ((2, 2), 2, True),
        ((2, 2), 1, False),
        ((3, 2), 2, False),
    ],
)
def test_another_order_of_sums_must_be_able_to_differ(
    tmp_path: Path, shape: tuple[int, int], hops: int, refused: bool, role: Role
) -> None:
    where = [f"cluster.nodes={shape[0]}", f"cluster.gpus_per_node={shape[1]}"]
    reordered = ["recipe.name=r", "recipe.order=reversed", f"recipe.hops={hops}"]
    halved = ["train.batch_size=2", "train.micro_steps=2"]

    def made(overrides: list[str]) -> StudyConfig:
        control = ArmConfig("control", overrides, role=role)
        arms = [ArmConfig("zero3", role="baseline"), control]
        return StudyConfig(
            name="t", question="?", arms=arms, seeds=[1], overrides=where, baseline="zero3"
        )

    with pytest.raises(ValueError, match=r"arm control: .*data\.draw_ranks"):
        Planner(made([*reordered, *halved]), tmp_path, fake_compose)
    where.append("data.draw_ranks=1")  # of the same sequences
    Planner(made([*reordered, *halved]), tmp_path, fake_compose)
    if not refused:
        Planner(made(reordered), tmp_path, fake_compose)
        return
    with pytest.raises(ValueError, match=r"arm control: .*train\.micro_steps"):
        Planner(made(reordered), tmp_path, fake_compose)


def test_arms_chosen_from_a_study_bring_what_they_are_compared_with() -> None:
    arms = [ArmConfig("zero3"), ArmConfig("again", role="baseline_repeat")]
    arms += [ArmConfig(name) for name in ("w4_32", "w4_64", "w8")]
    whole = [CompositeConfig("w4", ["w4_*"]), CompositeConfig("w4_32_alone", ["w4_32"])]
    chosen = some_arms(StudyConfig("t", "?", arms, [1], composites=whole), ["w4_32"])
    assert [arm.name for arm in chosen.arms] == ["zero3", "again", "w4_32"]
    assert [one.name for one in chosen.composites] == ["w4_32_alone"]  # half of w4 is another


def test_a_folder_of_another_study_is_an_error(tmp_path: Path) -> None:
    launch(study("zero3", seeds=1), tmp_path)
    other = StudyConfig(**{**vars(study("zero3", seeds=1)), "name": "other"})
    with pytest.raises(ValueError, match=r"'test'.*'other'.*--dir"):
        launch(other, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError):
        launch(study("zero3"), tmp_path / "file")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("told", [True, False])  # by the run's own failure.json, or its log alone
def test_a_full_disk_stops_the_study_and_costs_no_attempt(
    number: int, told: bool, tmp_path: Path
) -> None:
    (tmp_path / "errno").write_text(f"{number} {told}")
    what = study("zero3", "full", "last", seeds=1)
    said = rf"the disk is full \(\d+ MiB left: .*{os.strerror(number)}.*\).*same command"
    with pytest.raises(OSError, match=said) as error:
        launch(what, tmp_path, jobs=1)
    assert error.value.errno == errno.ENOSPC
    assert started(tmp_path) == ["zero3 1", "full 1"]
    assert not list(tmp_path.rglob("failure.json"))
    assert not list(tmp_path.rglob("attempts.jsonl"))
    (tmp_path / "healed").touch()
    assert launch(what, tmp_path, jobs=1)[0].finished == ["full seed 1", "last seed 1"]


def test_other_settings_in_a_folder_are_an_error(tmp_path: Path) -> None:
    what = study("zero3", seeds=1)
    launch(what, tmp_path)
    changed = StudyConfig(**{**vars(what), "overrides": ["train.lr=0.5", "engine.threads=7"]})
    with pytest.raises(ValueError, match=r"zero3/seed1.*train\.lr.*0\.003.*0\.5.*--dir"):
        launch(changed, tmp_path)
    free = StudyConfig(**{**vars(what), "overrides": ["engine.threads=7"]})
    assert launch(free, tmp_path)[0].skipped == ["zero3 seed 1"]


CHILD = """
import sys
from pathlib import Path
from tests.study.run.test_launch import ENTRY, fake_compose, study
from zpp_lab.study.run.launch import Launch, run_study
what, root = study("zero3", "slow"), Path(sys.argv[1])
outcome = run_study(what, root, Launch(2), compose=fake_compose, entry=ENTRY)
sys.exit(outcome.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_study_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    top = Path(__file__).parents[3]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=top)
    until(lambda: (tmp_path / "waiting1").exists() and (tmp_path / "waiting2").exists())
    with pytest.raises(ValueError):
        launch(study("zero3", "slow"), tmp_path)
    process.send_signal(number)
    text, _ = process.communicate(timeout=240)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "2 of 4 runs finished" in text
        assert "resumes from here" in text
    for seed in (1, 2):
        pid = int((tmp_path / "slow" / f"seed{seed}" / "pid.txt").read_text())
        until(lambda pid=pid: not alive(pid))
    assert not list(tmp_path.rglob("failure.json"))
    (tmp_path / "healed").touch()
    outcome, _ = launch(study("zero3", "slow"), tmp_path)
    assert (outcome.exit_code, len(outcome.skipped), len(outcome.finished)) == (0, 2, 2)


def test_a_run_that_ends_while_its_study_is_stopped_has_finished(tmp_path: Path) -> None:
    def interrupt() -> None:
        until((tmp_path / "waiting1").exists)
        until((tmp_path / "zero3" / "seed1" / "summary.json").exists)  # beside it
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome, text = launch(study("zero3", "late", seeds=1), tmp_path)
    thread.join()
    assert (outcome.exit_code, outcome.unfinished) == (0, [])
    assert "2 of 2 runs finished" in text


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
