"""Lines that outlive a call: another place, and results at the end of every call."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from zpp_lab.runs import provenance as facts

SCRIPTS = Path(__file__).parents[2] / "experiments"

# a run that writes a line, waits to be let on, and ends
LINES = """mkdir -p runs/s/w8/checkpoints "$RESULTS"
for n in 1 2; do
  echo "step $n"; echo "$n" >> runs/s/w8/metrics.jsonl; echo x > runs/s/w8/checkpoints/x
  until [ -f "$GO" ] || [ $n = 2 ]; do sleep 0.05; done
done
echo "$RESULTS of ${CALL:-no} seconds" > runs/s/w8/summary.json"""


class Machine:
    """A project's root that every call overwrites, and a disk beside it that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.go = folder, folder / "root", folder / "go"
        (self.root / "experiments" / "kernels").mkdir(parents=True)
        (self.root / "shared").mkdir()
        for name in ("background.sh", "kernels/env.sh"):
            (self.root / "experiments" / name).write_text((SCRIPTS / name).read_text())
        package = self.root / "zpp_lab"
        (package / "runs").mkdir(parents=True)
        for name in ("__init__.py", "runs/__init__.py"):
            (package / name).touch()
        for name in ("files.py", "runs/provenance.py"):
            (package / name).write_text((SCRIPTS.parent / "zpp_lab" / name).read_text())
        self.calls = 0

    def call(self, *words: str, seconds: str = "27", **more: str) -> tuple[int, str, Path]:
        """Exit code, what was said, and the call's own folder of results."""
        self.calls += 1
        out = self.folder / f"out{self.calls}"
        unset = ("CALL", facts.COMMIT)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
        own = {"BACKGROUND": str(self.folder / "kept"), "POLL": "0.1", "GO": str(self.go)}
        done = subprocess.run(
            ["bash", "experiments/background.sh", str(out), *words],
            cwd=self.root, env=kept | own | {"CALL": seconds} | more,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, out

    def begin(self, **more: str) -> tuple[int, str, Path]:
        (self.root / "experiments" / "job.sh").write_text(LINES)
        return self.call("start", "RESULTS=OUT bash experiments/job.sh", **more)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    session = tmp_path / "kept" / "session"
    if session.is_file():
        with suppress(ProcessLookupError):
            os.killpg(int(session.read_text()), signal.SIGKILL)


def names(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as file:
        found = {m.name: file.extractfile(m) for m in file.getmembers() if m.isfile()}
        return {name: stream.read().decode() for name, stream in found.items() if stream}


def test_a_run_goes_on_when_its_call_has_ended(machine: Machine) -> None:
    code, said, out = machine.begin()
    assert code == 75
    assert "step 1" in said
    assert names(out / "s.tar.gz") == {"s/w8/metrics.jsonl": "1\n"}
    assert not (machine.root / "runs").exists()
    assert not (machine.folder / "kept" / "tree" / "shared").exists()
    (machine.root / "experiments" / "job.sh").write_text("exit 3\n")  # the next call's own root
    machine.go.touch()
    code, said, out = machine.call("wait", seconds="60")
    assert code == 0
    assert "step 1\nstep 2" in said
    found = names(out / "s.tar.gz")
    assert found["s/w8/metrics.jsonl"] == "1\n2\n"
    assert found["s/w8/summary.json"] == f"{machine.folder}/kept/out of no seconds\n"
    assert "step 2" in (out / "log.txt").read_text()


def test_one_start_at_a_time_and_an_end_on_demand(machine: Machine) -> None:
    assert machine.begin()[0] == 75
    code, said, _ = machine.begin()
    assert code == 2
    assert "wait for them, or stop" in said
    code, said, out = machine.call("stop")
    assert code == 1
    assert "without an end" in said
    assert "s/w8/metrics.jsonl" in names(out / "s.tar.gz")
