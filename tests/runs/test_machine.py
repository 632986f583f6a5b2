"""Facts about the machine and the commit of the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from zpp_lab.cli.main import main
from zpp_lab.config.schema import Config
from zpp_lab.runs import provenance
from zpp_lab.tools import doctor
from zpp_lab.train.inputs import check_inputs


@pytest.fixture(autouse=True)
def nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.COMMIT, raising=False)


def test_container_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": "150000 100000", "memory.max": "1073741824"}
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(provenance, "_cgroup", limits.__getitem__)
    assert provenance.cores() == 2
    assert provenance.memory_bytes() == 2**30
    limits.update({"cpu.max": "max 100000", "memory.max": "max"})
    assert provenance.cores() == 64
    assert provenance.memory_bytes() > 2**30


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    look = provenance.commit.__wrapped__
    assert look(package) is None  # in a checkout, but no part of it, as an installed package is
    git(tmp_path, "add", ".")
    assert look(package) is None  # no commit yet
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert look(package) == head
    (package / "new.py").write_text("")
    assert look(package) == f"{head}-dirty"
    (package / "new.py").unlink()
    (tmp_path / "notes.txt").write_text("not code")
    assert look(package) == head
    (package / "__init__.py").write_text("changed = 1\n")
    assert look(package) == f"{head}-dirty"


HEAD = "0123456789abcdef0123456789abcdef01234567"
LOOK = provenance.commit.__wrapped__


@pytest.mark.parametrize("told", ["", "main", HEAD[:12], HEAD.upper(), f"{HEAD}-x", f"{HEAD}\n"])
def test_what_is_no_commit_is_refused_before_anything_starts(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(provenance.COMMIT, told)
    with pytest.raises(ValueError, match="ZPP_COMMIT"):
        LOOK(tmp_path)
    monkeypatch.setattr(provenance, "commit", lambda: LOOK(tmp_path))
    with pytest.raises(ValueError, match="ZPP_COMMIT"):
        check_inputs(Config())
    row = doctor.zpp_lab()
    assert (row.state, "or unset ZPP_COMMIT" in row.fix) == ("broken", True)
    monkeypatch.delenv(provenance.COMMIT)
    check_inputs(Config())


def test_a_wheel_knows_its_commit_and_the_version_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a checkout without tags too; ZPP_COMMIT says more."""
    wheel = tmp_path / "wheel"
    (wheel / "zpp_lab").mkdir(parents=True)
    (wheel / "zpp_lab" / "commit.txt").write_text("a" * 40 + "\n")
    assert LOOK(wheel / "zpp_lab") == "a" * 40
    monkeypatch.setattr(provenance, "commit", lambda: LOOK(wheel / "zpp_lab"))
    assert main(["--version"]) == 0
    assert re.fullmatch(rf"zpp_lab \S+, commit {'a' * 40}, torch \S+\n", capsys.readouterr().out)
    monkeypatch.setenv(provenance.COMMIT, "b" * 40)
    assert LOOK(wheel / "zpp_lab") == "b" * 40
