"""The dry run over a fake trainer: what is said before, what is measured, and what it leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.runs import corpus
from tests.study.fake_trainer import STEPS, fake_compose
from tests.study.test_launch import ENTRY, launch, started, study
from zpp_lab.cli import main
from zpp_lab.compose import compose
from zpp_lab.config import StudyConfig
from zpp_lab.study import calibration, cost, dry_run
from zpp_lab.study import launch as launching
from zpp_lab.study.calibration import FOLDER, Cost, Unknown, known_costs
from zpp_lab.study.cost import Estimate
from zpp_lab.study.dry_run import Asked, amount
from zpp_lab.study.foreseen import Foreseen, Needed, memory_need, predicted_seconds
from zpp_lab.study.queue import Stop

FORESEEN = Foreseen(1000, Needed(2000, at_least=True))


@pytest.fixture(autouse=True)
def _no_plan_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake study's settings make no plan."""
    monkeypatch.setattr(calibration, "tokens_are_ready", lambda config: True)
    monkeypatch.setattr(cost, "foresee", lambda config: FORESEEN)


def look(
    what: StudyConfig, root: Path, asked: Asked | None = None, entry: str = ENTRY
) -> tuple[Estimate, str]:
    out = io.StringIO()
    console = Console(file=out, width=140)
    found = dry_run.dry_run(
        what, root, 2, asked, compose=fake_compose, entry=entry, console=console
    )
    return found, out.getvalue()


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_each_shape_is_measured_once_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = study("zero3", "a")
    found, text = look(what, tmp_path)
    assert not (tmp_path / "zero3").exists()
    assert [f.bytes for f in found.runs] == [1000 * STEPS] * 4
    assert found.runs[0].seconds == pytest.approx(0.1 * STEPS)
    assert found.seconds == pytest.approx(4 * 0.1 * STEPS / 2)
    assert "4 runs, 0 ended already; about 0:01 left with 2 side by side" in text
    assert text.count(f"\nzero3, a: train.warmup_steps=20 is more than train.steps={STEPS}: ") == 1
    assert [path.suffix for path in (tmp_path / FOLDER).iterdir()] == [".json"]

    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured twice"))
    launch(study("zero3", seeds=1), tmp_path)
    before = started(tmp_path)
    found, text = look(what, tmp_path)
    assert started(tmp_path) == before
    assert [f.state for f in found.runs].count("finished") == 1
    assert "1 finished" in text


def test_bytes_and_memory_are_printed_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    seen: list[str] = []

    def calibrate(*_: object) -> Unknown:
        seen.append(out.getvalue())
        return Unknown("enough")

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    console = Console(file=out, width=140)
    dry_run.dry_run(study("zero3"), tmp_path, 1, compose=fake_compose, console=console)
    (before,) = seen
    assert "Sent in a run" in before
    assert "≥ 2 kB" in before
    assert "Measuring 1 shape of run, 6 steps each, for at most 60 s each" in before


@pytest.mark.parametrize(
    ("steps", "seconds", "said"),
    [
        (0, None, "No times of zero3: no step ended, in "),
        (1, None, "No times of zero3: one step ended, its first (3.5 s), in "),
        (2, 0.5, "zero3: 0.5 s a step from the steps that were whole"),
        (4, 0.5, "at least 0:02 left"),
    ],
)
def test_past_the_limit_only_whole_steps_count(
    tmp_path: Path, steps: int, seconds: float | None, said: str
) -> None:
    (tmp_path / "stuck_after").write_text(str(steps))
    found, text = look(study("zero3"), tmp_path, Asked(limit=3.0))
    assert said in text
    known = found.runs[0].cost
    if seconds is None:
        assert isinstance(known, Unknown)
        assert "time left unknown" in text
    else:
        assert isinstance(known, Cost)
        assert known.step_seconds == pytest.approx(seconds)
        assert known.floor  # evaluation is unknown
        assert "≥ 0:02" in text
        assert known_costs(tmp_path, 3.0)
        assert not known_costs(tmp_path, 60.0)  # a longer limit may see more
    assert not found.faults
    assert ended(int((tmp_path / "pid.txt").read_text()))
    assert not [path for path in (tmp_path / FOLDER).iterdir() if path.is_dir()]


CHILD = """
import sys
from pathlib import Path
from tests.study.fake_trainer import fake_compose
from tests.study.test_launch import ENTRY, study
from tests.study.test_dry_run import FORESEEN
from zpp_lab.study import calibration, cost
from zpp_lab.study.dry_run import dry_run
cost.foresee = lambda config: FORESEEN
calibration.tokens_are_ready = lambda config: True
found = dry_run(study("zero3", "a"), Path(sys.argv[1]), 1, compose=fake_compose, entry=ENTRY)
print("stopped", found.stopped)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stuck_after").write_text("3")
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    file = tmp_path / "pid.txt"
    while not file.exists() or not file.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate()
    pid = int(file.read_text())
    for _ in range(200):
        if ended(pid):
            break
        time.sleep(0.05)
    assert ended(pid)
    if number != signal.SIGKILL:
        assert "stopped True" in said
        assert "≥ 0:02" in said  # the steps that were whole when it was stopped


def test_a_shape_that_fails_is_told(tmp_path: Path) -> None:
    found, text = look(study("exits", "zero3"), tmp_path, entry="tests.study.fake_trainer:fail")
    assert "no cost for the shape of zero3, exits: crashed: " in text
    assert "RuntimeError: always" in found.faults[0]
    assert found.runs[0].seconds is None
    assert "time left unknown" in text


def test_what_cannot_fit_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "memory_bytes", lambda: 1999)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("tried"))
    _, text = look(study("zero3"), tmp_path)
    assert "needs 2 kB of memory, and this machine has 2 kB" in text


def test_limit_0_measures_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    _, text = look(study("zero3"), tmp_path / "new", Asked(limit=0))
    assert "No times of zero3: --limit 0 measures nothing" in text
    assert "Time of a run" not in text
    assert not (tmp_path / "new").exists()


def test_token_files_are_announced_and_have_the_same_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "tokens_are_ready", lambda config: False)
    monkeypatch.setattr(calibration, "TOKENS", "tests.study.fake_trainer:run")
    (tmp_path / "stuck_after").write_text("0")
    _, text = look(study("zero3", "a"), tmp_path, Asked(limit=2.0))
    assert text.count("data=stdlib has no token files yet: they are made first, for at") == 1
    assert "No times of zero3, a: its token files were not made in " in " ".join(text.split())
    assert "zpp-lab prepare test" in text


def test_token_files_are_made_in_a_process_of_their_own(tmp_path: Path) -> None:
    """With a real corpus: nothing before, whole files after, the same that a run finds."""
    from zpp_lab.data.corpus import open_corpus
    from zpp_lab.data.prepare import is_prepared

    texts = corpus(tmp_path)
    settings = [f"data.path={texts}", "data.name=text", f"data.cache_dir={tmp_path / 'cache'}"]
    config = fake_compose([*settings, "data.seq_len=16", "data.heldout_every=2"])
    assert not is_prepared(open_corpus(config.data), config.data)
    run = calibration.PlannedRun("a", 1, tmp_path / "a" / "seed1", config)
    limits = calibration.Limits(60.0, Stop())
    places = dry_run.make_places(1, 0, [config])
    assert calibration.prepare_tokens(tmp_path, run, places, limits, lambda *_: None) is None
    assert is_prepared(open_corpus(config.data), config.data)


def test_token_files_that_cannot_be_made_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "tokens_are_ready", lambda config: False)
    monkeypatch.setattr(calibration, "TOKENS", "tests.study.fake_trainer:fail")
    found, _ = look(study("zero3"), tmp_path)
    assert found.faults == ["zero3: its token files: RuntimeError: always"]


def test_a_named_machine_takes_the_place_of_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured"))
    words = ["study", "smoke", "--dry-run", "--dir", str(tmp_path / "s"), "--machine", "h200"]
    assert main([*words, "train.param_dtype=bf16", "--arms", "zero3"]) == 0
    assert "at least" in capsys.readouterr().out
    assert main([*words, "--arms", "zero3"]) == 0
    assert (
        "No times of zero3: train.param_dtype=fp32: figures are of bf16" in capsys.readouterr().out
    )
    assert not (tmp_path / "s").exists()


def test_predictions_are_the_cost_models() -> None:
    from zpp_lab.cost.machine import load_machine
    from zpp_lab.cost.step import predict

    config = compose(["model=1m", "cluster=2x2", "engine=fsdp", "train.param_dtype=bf16"])
    whole = predict(config, load_machine("h200"), 25.0).step_s
    assert predicted_seconds(config, "h200", 25.0) == (whole, False)
    alone = compose(["model=1m", "cluster=2x2", "train.param_dtype=bf16"])
    seconds, floor = predicted_seconds(alone, "h200", None)
    assert floor
    assert 0 < seconds < 4 * whole


def test_memory_of_a_virtual_run_is_at_least_what_it_keeps() -> None:
    """1M parameters in fp32: weights, masters, moments, sums; bf16 saves the weights' half, and
    has a copy to encode from."""
    need = memory_need(compose(["model=tiny"]))
    half = memory_need(compose(["model=tiny", "train.param_dtype=bf16"]))
    real = memory_need(compose(["model=tiny", "engine=fsdp"]))
    assert need is not None
    assert half is not None
    assert real is not None
    assert need.at_least
    assert not need.each
    assert half.nbytes == need.nbytes  # 4 = 2 + 2
    assert real.each
    assert not real.at_least


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--limit", "soon", "--dry-run"], "--limit soon: give a time above 0"),
        (["--limit", "60"], "--limit goes with --dry-run"),
        (["--machine", "h200"], "--machine goes with --dry-run"),
        (["--machine", "h300", "--dry-run"], "the name of a ready one: h200"),
        (["--link-gbps", "5", "--dry-run"], "--link-gbps goes with --machine"),
        (["--machine", "h200", "--link-gbps", "5,6", "--dry-run"], "give one speed, or max"),
    ],
)
def test_mistakes_are_answered(words: list[str], answer: str, tmp_path: Path, capsys) -> None:
    assert main(["study", "smoke", "--dir", str(tmp_path / "s"), *words]) == 2
    assert answer in capsys.readouterr().err


REFUSED = [
    ("--for soon", "--for soon: give a time above 0"),
    ("--for 8m --launcher basic", "--for is for runs on this machine"),
    ("--launcher slrum", "Hydra's launcher 'slrum' cannot start"),
    ("--launcher basic --jobs 2", "--jobs is for runs on this machine"),
    ("--launcher basic --runs-per-gpu 2", "--runs-per-gpu is for runs on this machine"),
    ("--jobs -1", "jobs=-1: use 0"),
    ("--arms w5* --alone", "--arms w5*: no such arm"),
    ("data=text data.path=/no/text", "study smoke, zero3, zero3_reordered, zeropp, qsdp"),
]


@pytest.mark.parametrize(("words", "answer"), REFUSED)
def test_a_dry_run_refuses_what_the_study_refuses(
    words: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching.Queue, "run", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured"))
    command = ["study", "smoke", "--dir", str(tmp_path / "s"), *words.split()]
    told = []
    for more in (["--dry-run"], ["--dry-run", "--limit", "0"], []):
        assert main([*command, *more]) == 2
        said = capsys.readouterr()
        told.append(said.err)
        assert said.out == ""
        assert more == [] or not (tmp_path / "s").exists()
    assert answer in told[0]
    assert told[0] == told[1] == told[2]


def test_alone_shows_those_runs_and_looks_at_their_folders(tmp_path: Path, capsys) -> None:
    command = ["study", "smoke", "--dir", str(tmp_path), "--arms", "w?", "--alone", "--seeds", "8"]
    looked = [*command, "--dry-run", "--limit", "0"]
    assert main([*looked, "train.steps=7"]) == 0
    said = capsys.readouterr().out
    assert "3 runs, 0 finished" in said
    assert [arm for arm in ("w2", "w4", "w6", "zero3", "broken") if f"\n{arm} " in said] == [
        "w2", "w4", "w6",
    ]  # fmt: skip
    run = tmp_path / "w4" / "seed8"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 9}\n")
    assert main(looked) == 2
    assert f"{run} holds a run with other settings: " in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--machine h200", "--launcher basic --limit 0"])
def test_files_of_runs_elsewhere_need_not_be_here(words: str, tmp_path: Path, capsys) -> None:
    """As the study does with a launcher, whose jobs may see other folders."""
    study_here = ["study", "smoke", "--dry-run", "--dir", str(tmp_path / "s"), "data=text"]
    assert main([*study_here, "data.path=/no/text", "--arms", "zero3", *words.split()]) == 0
    assert "3 runs, 0 ended already" in capsys.readouterr().out


def test_jobs_and_launchers_are_looked_at_where_a_machine_is_named(tmp_path: Path, capsys) -> None:
    words = ["study", "smoke", "--dry-run", "--dir", str(tmp_path / "s"), "--machine", "h200"]
    assert main([*words, "--jobs", "-1"]) == 2
    assert "jobs=-1: use 0" in capsys.readouterr().err
    assert main([*words, "--launcher", "slrum"]) == 2
    assert "'slrum' cannot start" in capsys.readouterr().err


def test_a_broken_calibration_file_is_one_less(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "a.json").write_text("{")
    old = {"step_seconds": 1.0, "other_seconds": 2.0, "peak_memory_bytes": None}
    (tmp_path / FOLDER / "b.json").write_text(json.dumps({"shape": "s", "cost": old}))
    assert known_costs(tmp_path, 60.0) == {"s": Cost(1.0, 2.0)}


def test_amounts_are_for_people() -> None:
    said = [amount(n) for n in (0, 999, 1500, 2.5e9, 3e15)]
    assert said == ["0 B", "999 B", "1.5 kB", "2.5 GB", "3e+03 TB"]


def test_a_calibration_leaves_out_warm_up_and_evaluation() -> None:
    config = fake_compose(["train.steps=100", "train.eval_every=10"])
    rows = [{"seconds": s} for s in (9.0, 10.0, 10.5, 11.0, 11.5, 14.0)]
    found = calibration.whole_cost(rows, config, None)
    assert found.step_seconds == pytest.approx(0.5)
    assert found.other_seconds == pytest.approx(2.0 * 12)
    assert json.dumps(found.seconds(100)) == "74.0"
