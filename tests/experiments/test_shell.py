"""What the experiments' scripts share: the time that is left of a call, whole archives, and arms
that are begun only when they can end."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bash(program: str, out: Path, **variables: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CALL")}
    done = subprocess.run(
        ["bash", "-c", program], cwd=ROOT, env=kept | {"OUT": str(out)} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("call", "wanted", "given"), [("", 200, 200), ("600", 200, 200), ("125", 200, 100), ("9", 5, 1)]
)
def test_a_limit_is_what_is_left_of_the_call(
    tmp_path: Path, call: str, wanted: int, given: int
) -> None:
    said = bash(f"source experiments/kernels/env.sh; within {wanted}", tmp_path, CALL=call)
    assert given - 3 <= int(said) <= given


def test_the_call_began_with_the_first_script(tmp_path: Path) -> None:
    program = "source experiments/kernels/env.sh; CALL_END=$((CALL_END - 300)); export CALL_END; "
    program += "bash -c 'source experiments/kernels/env.sh; within 500'"
    assert 272 <= int(bash(program, tmp_path, CALL="600")) <= 275


def test_an_archive_is_whole_or_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "results.csv").write_text("a\n")
    pack = 'source experiments/kernels/env.sh; packed "$OUT/s.tar.gz" -C "$OUT/runs" '
    bash(pack + "s", tmp_path)
    bash(pack + "nothing 2> /dev/null || true", tmp_path)
    with tarfile.open(tmp_path / "s.tar.gz") as file:
        assert file.getnames() == ["s", "s/results.csv"]


@pytest.mark.parametrize(
    ("call", "finished", "said"),
    [
        ("600", False, "asked"),
        ("100", False, "not begun"),
        ("", False, "asked"),
        ("100", True, "finished before"),
    ],
)
def test_an_arm_begins_only_when_it_can_end(
    tmp_path: Path, call: str, finished: bool, said: str
) -> None:
    """`zpp` in place of the command line: it says what it was asked."""
    run = tmp_path / "runs" / "s" / "w8" / "seed1"
    run.mkdir(parents=True)
    (run / "log.txt").write_text("start-up 1 s\n")
    if finished:
        (run / "summary.json").write_text("{}\n")
    program = f"cd {ROOT}; source experiments/size.sh; cd $OUT; out=$OUT; LIMIT=240; "
    program += 'zpp="echo asked"; arm s w8 model=tiny'
    text = bash(program, tmp_path, CALL=call)
    assert said in text
    assert ("asked study s --arms w8 --alone --seeds 1" in text) == (said == "asked")
    with tarfile.open(tmp_path / "s.tar.gz") as file:
        assert "s/w8/seed1/log.txt" in file.getnames()
