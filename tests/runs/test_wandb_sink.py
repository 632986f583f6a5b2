"""wandb as a sink: it has the whole run or can be given it, and training never waits."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import FakeWandb
from tests.runs.wandb_file import OfflineRun
from zpp_lab.config.schema import Config, RunConfig, TrackingConfig, TrainConfig
from zpp_lab.files import COMPLETIONS
from zpp_lab.runs.metrics import read
from zpp_lab.runs.provenance import note_commit
from zpp_lab.runs.tracker import Tracker
from zpp_lab.runs.wandb.folder import RunFolder
from zpp_lab.runs.wandb.process import start_study_sink
from zpp_lab.runs.wandb.sink import serve_study, sync, sync_all

LIMIT = 240.0  # seconds; only a failing test waits that long


def config(run: RunConfig | None = None, **tracking: Any) -> Config:
    return Config(
        seed=3,
        train=TrainConfig(steps=20),
        tracking=TrackingConfig(**{"timeout_seconds": LIMIT, "tags": ["t1"], **tracking}),
        run=run or RunConfig(),
    )


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 4.0 / step,
        "tokens": step * 256,
        "seconds": step * 0.1,
        "bytes": {"weights_forward": {"intra": step, "inter": 2 * step}},
        "telemetry": {"grads_inter": {"mlp": {"nmse": math.nan}}},
    }


def write_run(folder: Path, cfg: Config, steps: range = range(1, 21)) -> Tracker:
    tracker = Tracker(cfg, folder, steps.start - 1)
    for step in steps:
        tracker.log(record(step))
    return tracker


def finish(tracker: Tracker) -> None:
    done = {"outcome": "finished", "steps": 3, "loss": 0.2, "heldout_loss": None}
    tracker.finish({**done, "bytes": {"weights_forward": {"intra": 9}}})


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "wandb.json").read_text())


def sent(tracker: Tracker) -> bool:
    assert tracker._sink is not None
    return tracker._sink.wait(LIMIT)


def test_offline_run_holds_everything(tmp_path: Path) -> None:
    tracker = write_run(tmp_path, config(RunConfig(name="mine")))
    finish(tracker)
    assert sent(tracker), (tmp_path / "wandb.log").read_text()
    run = OfflineRun(tmp_path)
    assert [row["_step"] for row in run.history] == list(range(1, 21))
    row = run.history[6]
    assert row["loss"] == 4.0 / 7
    assert row["bytes/weights_forward/inter"] == 14
    assert (row["train/loss"], row["train/bytes"]) == (row["loss"], 7 + 14)
    shown = ("train/loss", "val/loss", "train/bytes", "memory/*")
    assert not any(run.metrics[name].options.hidden for name in shown)
    for name in ("loss", "heldout_loss", "bytes/*", "telemetry/*"):  # no panels by themselves
        assert run.metrics[name].options.hidden
    assert math.isnan(row["telemetry/grads_inter/mlp/nmse"])
    assert run.summary["final/bytes/weights_forward/intra"] == 9
    assert run.summary["bytes/weights_forward/intra"] == 20  # of the last step
    assert run.config["recipe"]["name"] == "zero3"
    assert (run.run.display_name, run.run.project) == ("mine", "zpp_lab")
    assert run.run.job_type == "zero3"
    assert next(iter(run.run.tags)) == "t1"
    assert run.exit == 0
    assert state(tmp_path)["state"] == "complete"
    assert run.run.run_id == state(tmp_path)["id"]


def test_completions_are_tables(tmp_path: Path) -> None:
    rewards = {"reward": 0.5, "success": 0.4, "length": 3.0, "entropy": 1.1, "kl": 0.1}
    shown = [
        {"step": s, "prompt": "1+2=", "completion": str(s), "rewards": {"addition": float(s == 3)}}
        for s in (2, 2, 3)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in shown)
    (tmp_path / COMPLETIONS).write_text(lines)
    tracker = Tracker(config(), tmp_path, 0)
    for step in (1, 2, 3):
        heldout = {"heldout_loss": 0.6} if step > 1 else {}
        tracker.log(record(step) | heldout | {"rl": rewards})
    finish(tracker)
    assert sent(tracker), (tmp_path / "wandb.log").read_text()
    run = OfflineRun(tmp_path)
    assert [row["rl/kl"] for row in run.history] == [0.1] * 3
    assert [row.get("completions/nrows") for row in run.history] == [None, 2, 1]
    assert run.summary["completions"]["nrows"] == 1
    (file,) = tmp_path.glob(f"wandb/offline-run-*/files/{run.history[2]['completions/path']}")
    found = json.loads(file.read_text())
    assert found["columns"] == ["step", "prompt", "completion", "addition"]
    assert found["data"] == [[3, "1+2=", "3", 1.0]]


@pytest.mark.parametrize("on", [True, False])
def test_system_console_and_commit_are_there_unless_switched_off(
    tmp_path: Path, on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    switches = {"console": on, "system": on, "git": on}
    before = sys.stdout
    tracker = write_run(tmp_path, config(**switches), range(1, 3))
    note_commit(tmp_path, 0, "c0ffee")
    print("a word\rof the", "training")
    print("and of its errors", file=sys.stderr)
    if on:  # before the end: afterwards nobody can tell them
        wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    finish(tracker)
    assert sys.stdout is before
    assert sent(tracker), (tmp_path / "wandb.log").read_text()
    run = OfflineRun(tmp_path)
    assert bool(run.system) == on
    assert run.run.git.commit == ("c0ffee" if on else "")
    said = {line for line in run.console.splitlines() if line}
    assert said >= {"of the training", "and of its errors"} if on else not said
    for metrics in run.system:  # of the training's process, not of the one that sends
        assert metrics["proc.memory.rssMB"] > 0
    assert "of the training" in capsys.readouterr().out
    assert (tmp_path / "console.log").exists() == on


def test_what_is_sent_later_has_the_console_once_and_no_system(
    tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    tracker = write_run(tmp_path, config(wandb="off"), range(1, 3))
    print("a word")
    tracker.fail({"outcome": "crashed", "error": "e", "traceback": "Traceback: it broke"})
    for _ in range(2):
        sync(tmp_path)
        ((_, run),) = fake_wandb.runs.items()
        text = "".join(run["console"])
        assert [text.count(line) for line in ("a word", "Traceback: it broke")] == [1, 1]


def test_one_process_sends_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cfg(arm: str, **tracking: Any) -> Config:
        return config(RunConfig(study="smoke", arm=arm), **tracking)

    handle = start_study_sink(tmp_path, TrackingConfig())
    assert "wandb: offline (no key found)" in capsys.readouterr().out
    finish(write_run(tmp_path / "zero3" / "seed3", cfg("zero3")))
    write_run(tmp_path / "w2", cfg("w2")).fail({"outcome": "diverged", "error": "e"})
    finish(write_run(tmp_path / "quiet", cfg("quiet", wandb="off")))
    write_run(tmp_path / "going", cfg("going"))
    assert handle.wait(LIMIT), (tmp_path / "wandb.log").read_text()
    one, two = OfflineRun(tmp_path / "zero3" / "seed3"), OfflineRun(tmp_path / "w2")
    assert (one.run.run_group, one.run.job_type, one.exit) == ("smoke", "zero3", 0)
    assert one.run.display_name == "zero3 seed3"
    assert len(one.history) == len(two.history) == 20
    assert two.summary["final/outcome"] == "diverged"
    assert two.exit == 1
    assert not (tmp_path / "going" / "wandb.json").exists()  # it has not ended
    assert not (tmp_path / "quiet" / "wandb").exists()


def test_study_serves_a_retried_run_again_and_outlives_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[str] = []

    def follow(folder: RunFolder, mode: str, ended: Any) -> bool:
        followed.append(folder.path.name)
        folder.note(state="complete", ended=folder.ended())
        return True

    monkeypatch.setattr("zpp_lab.runs.wandb.sink.follow", follow)
    cfg = config(RunConfig(study="s"))
    write_run(tmp_path / "b", cfg).fail({"outcome": "crashed"})
    finish(write_run(tmp_path / "a", cfg))
    (tmp_path / "a" / "config.yaml").write_text("{ no yaml")
    assert serve_study(tmp_path, "offline", lambda _: False) == 1
    assert followed == ["b"]
    finish(write_run(tmp_path / "b", cfg))
    (tmp_path / "a" / "config.yaml").write_text("tracking: {wandb: auto}")
    assert serve_study(tmp_path, "offline", lambda _: False) == 0
    assert followed == ["b", "a", "b"]
    assert serve_study(tmp_path, "offline", lambda _: False) == 0
    assert len(followed) == 3


def test_dead_server_costs_training_nothing(tmp_path: Path, dead_server: str) -> None:
    begun = time.monotonic()
    tracker = write_run(tmp_path, config(wandb="online", timeout_seconds=1.0))
    finish(tracker)
    returned = time.monotonic() - begun
    assert not sent(tracker)
    assert returned < time.monotonic() - begun  # the process was still trying
    found = state(tmp_path)
    assert found["state"] == "failed"
    assert found["error"].startswith("CommError: ")
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == list(range(1, 21))
    with pytest.raises(RuntimeError, match="CommError"):
        sync(tmp_path)


def test_replay_fills_holes_and_sends_nothing_twice(
    tmp_path: Path, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    finish(write_run(folder, config(RunConfig(arm="w4"), wandb="off")))
    assert sync_all([tmp_path]) == 0
    run_id = state(folder)["id"]
    assert fake_wandb.steps(run_id) == list(range(1, 21))
    del fake_wandb.runs[run_id]["lines"][12:]  # as if it had been cut off in the middle
    fake_wandb.runs[run_id]["summary"] = "{}"
    assert run_id in str(sync(folder))
    assert fake_wandb.steps(run_id) == list(range(1, 21))
    assert run_id in str(sync(folder))
    assert fake_wandb.steps(run_id) == list(range(1, 21))
    assert len(fake_wandb.runs) == 1
    with RunFolder(folder).lock(wait=False), pytest.raises(RuntimeError):
        sync(folder)
    with pytest.raises(ValueError, match="none: "):
        sync_all([tmp_path / "none"])
    capsys.readouterr()


TRAINER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.runs.test_wandb_sink import config, write_run
write_run(sys.argv[2], config(), range(1, 11))
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_resumed_run_is_one_run_online(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", TRAINER, str(root), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_for(lambda: fake_wandb.runs)
        assert process.poll() is None  # the run is there while training goes on
        process.communicate(b"x")
    assert process.returncode == -signal.SIGKILL
    tracker = write_run(tmp_path, config(), range(7, 16))  # from the checkpoint of step 6
    finish(tracker)
    assert sent(tracker), (tmp_path / "wandb.log").read_text()
    ((run_id, run),) = fake_wandb.runs.items()
    assert fake_wandb.steps(run_id) == list(range(1, 16))
    assert run["exit"] == 0
    assert json.loads(run["summary"])["final/outcome"] == "finished"
    assert state(tmp_path)["sent_step"] == 15


def wait_for(condition: Any) -> None:
    stop = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < stop, "waited too long"
        time.sleep(0.05)
