"""A bad wire to wandb: training ends as ever, nothing is lost, and `zpp-lab sync` mends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.conftest import FakeWandb, be_patient
from tests.runs.test_wandb_sink import config, finish, sent, state, write_run
from zpp_lab.cli.main import main
from zpp_lab.runs.metrics import read

EVERY = list(range(1, 21))


@pytest.mark.parametrize("fault", ["500s", "drops", pytest.param("hangs", marks=pytest.mark.slow)])
def test_training_goes_on_and_sync_sends_the_rest(
    fault: str, tmp_path: Path, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_wandb.fault = fault
    tracker = write_run(tmp_path, config(wandb="online", timeout_seconds=1.5))
    finish(tracker)
    assert not sent(tracker)
    assert "zpp-lab sync" in capsys.readouterr().err
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == EVERY
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "finished"
    assert state(tmp_path)["state"] == "failed"
    if fault == "500s":
        assert main(["sync", str(tmp_path)]) == 1
        assert "was not sent to wandb: " in capsys.readouterr().err
    fake_wandb.fault = None
    fake_wandb.released.set()
    be_patient(tmp_path)
    assert main(["sync", str(tmp_path)]) == 0
    ((run_id, run),) = fake_wandb.runs.items()
    assert run_id in capsys.readouterr().out
    assert fake_wandb.steps(run_id) == EVERY
    assert run["exit"] == 0
    assert state(tmp_path)["error"] is None


@pytest.mark.slow
def test_a_slow_server_gets_everything(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    fake_wandb.fault = "slow"
    tracker = write_run(tmp_path, config(wandb="online"))
    finish(tracker)
    assert sent(tracker), (tmp_path / "wandb.log").read_text()
    ((run_id, _),) = fake_wandb.runs.items()
    assert fake_wandb.steps(run_id) == EVERY


def test_sync_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(write_run(tmp_path, config(wandb="off")))
    assert main(["sync", str(tmp_path)]) == 2
    assert "needs an API key: run `wandb login`" in capsys.readouterr().err
    monkeypatch.setattr("zpp_lab.runs.wandb.mode.installed", lambda: False)
    assert main(["sync", str(tmp_path)]) == 2
    assert "pip install wandb" in capsys.readouterr().err
