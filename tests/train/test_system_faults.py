"""What the machine, or another start, does to a command: exit code 2, in one line with the fix."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_runs import small
from zpp_lab.cli.main import main
from zpp_lab.files import hold
from zpp_lab.train.trainer import run

HERE = {"engine.device=cpu", "tracking.wandb=off", "data.path=texts", "data=text"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and a finished run."""
    place = tmp_path_factory.mktemp("place")
    run(small(place, f"run.dir={place / 'runs' / 'good'}", "train.steps=3"))
    return place


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("zpp_lab.files.reachable", lambda: pytest.fail("the Hub was asked"))


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "change its permissions"),
        (errno.EROFS, "change its permissions"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EISDIR, "use a file"),
    ],
)
def test_each_error_of_the_system_names_a_fix(
    number: int, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr("zpp_lab.tools.doctor.doctor", fail)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert "some/file: " in said
    assert fix in said


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train data.path=texts run.dir=runs/new data.cache_dir=small", "free some space there"),
        ("export runs/good --to hf --out o", "free some space there"),
        ("export runs --steps --out x.csv", "cannot write x.csv: File too large"),
    ],
)
def test_a_disk_that_takes_no_more(
    words: str,
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit on the size of files stands for the disk's end."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what is imported now would be cut too
    command, *rest = words.split()
    settings = sorted(HERE) if command == "train" else []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        code = main([command, *settings, *rest])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    said = capsys.readouterr().err
    assert (code, answer in said) == (2, True), said
    assert not Path("o").exists()
    assert not Path("x.csv").exists()


def test_an_error_is_not_hidden_by_a_folder_that_takes_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "cannot write failure.json")

    monkeypatch.setattr("zpp_lab.train.trainer.write_failure", refuse)
    with pytest.raises(ValueError, match=r"\btexts\b"):
        run(small(Path.cwd(), "run.dir=runs/new", "data.path=textz"))
    assert "failure.json" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_on_a_full_disk_say_it_once() -> None:
    """Every rank meets it; a limit on the size of files, which ranks inherit, stands for it. The
    same command goes on where there is room."""
    words = ["run.dir=runs/ranks", "engine=fsdp", "engine.device=cpu", "cluster=1x2"]
    words += ["data.heldout_every=2"]  # enough held-out tokens for no word about them
    words += ["model.dim=64", "model.ffn=256", "model.heads=2", "model.kv_heads=2"]
    words += ["train.steps=8", "train.checkpoint_every=2", "train.warmup_steps=1"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}));"
    code = "from zpp_lab.cli.main import main; raise SystemExit(main())"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # else the limit cuts those files

    def start(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "train", *sorted(HERE), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=env
        )

    for size, path in ((100_000, "runs/ranks/checkpoints: "), (1_000, "/config.yaml: ")):
        ended = start(f"{limit.format(size)} {code}")
        assert ended.returncode == 2, ended.stderr
        (line,) = ended.stderr.splitlines()
        assert path in line
        assert "File too large" in line
        assert "ulimit -f" in line
    ended = start(code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert Path("runs/ranks/summary.json").exists()


def test_two_starts_of_one_run_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/twice")
    folder.mkdir()
    with hold(folder):
        assert main(["train", *sorted(HERE), "run.dir=runs/twice"]) == 2
    assert "run.dir" in capsys.readouterr().err
