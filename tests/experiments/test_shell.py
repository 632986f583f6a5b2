"""What the experiments' scripts share: the time that is left of a call, whole archives, and arms
that are begun only when they can end."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from zpp_lab.runs.reader import read_metrics

ROOT = Path(__file__).parents[2]


def bash(program: str, out: Path, **variables: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CALL")}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"  # python3 is this one
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


def test_a_part_of_the_speed_bench_begins_only_while_the_call_lasts(tmp_path: Path) -> None:
    """Its other parts go on where there is no call to end."""
    program = 'bash experiments/speed/run.sh "$OUT" nothing'
    assert "nothing: not begun" in bash(program, tmp_path, CALL="60", GPUS="2")
    assert "no part nothing" in bash(program, tmp_path, GPUS="2")


def test_a_speed_bench_that_is_stopped_ends_its_ranks_first(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/bash\ncase "$*" in\n*"bench step"*)\n'
        "  trap 'touch \"$OUT/ended\"; exit 0' TERM\n"
        f'  touch "$OUT/began"; for i in {{1..900}}; do sleep 0.1; done ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    program = 'PATH="$OUT/bin:$PATH" bash experiments/speed/run.sh "$OUT" 1x2 2x2 & '
    program += 'while [ ! -f "$OUT/began" ]; do sleep 0.1; done; kill "$!"; wait "$!"'
    said = bash(program, tmp_path, GPUS="2")
    assert (tmp_path / "ended").exists()
    assert "2x2: not begun, stopped" in said


def test_runs_of_one_gpu_each_take_any_number_of_them(tmp_path: Path) -> None:
    program = "source experiments/size.sh; echo there"
    assert bash(f"ONE_GPU=yes; {program}", tmp_path, GPUS="1") == "there\n"
    assert bash(f"({program}) 2> /dev/null; echo $?", tmp_path, GPUS="1") == "2\n"
    assert bash(program, tmp_path, GPUS="2") == "there\n"


def test_an_archive_is_whole_or_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "results.csv").write_text("a\n")
    pack = 'source experiments/kernels/env.sh; packed "$OUT/s.tar.gz" "$OUT/runs" '
    bash(pack + "s", tmp_path)
    bash(pack + "nothing 2> /dev/null || true", tmp_path)
    with tarfile.open(tmp_path / "s.tar.gz") as file:
        assert file.getnames() == ["s", "s/results.csv"]


def test_an_archive_is_made_while_runs_write(tmp_path: Path) -> None:
    """tar says 1 for a file that grew: the archive counts, and readers cope with a cut line."""
    run = tmp_path / "runs" / "s" / "a" / "seed1"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step1.pt").write_text("large")
    (run / "config.yaml").write_text("seed: 1\n")
    text = 'while true; do printf \'{"step": %d, "loss": 1.0}\\n\' $((++n)) >> $OUT/m; done & '
    text = text.replace("$OUT/m", "$OUT/runs/s/a/seed1/metrics.jsonl")
    program = "source experiments/kernels/env.sh; " + text + "writer=$!; sleep 0.3; "
    program += 'for i in 1 2 3 4 5 6; do packed "$OUT/$i.tar.gz" "$OUT/runs" s checkpoints; '
    program += 'echo "$?"; done; kill $writer'
    assert bash(program, tmp_path).split() == ["0"] * 6
    for i in range(1, 7):
        there = tmp_path / f"there{i}"
        with tarfile.open(tmp_path / f"{i}.tar.gz") as file:
            file.extractall(there, filter="data")
        assert not (there / "s" / "a" / "seed1" / "checkpoints").exists()
        rows = read_metrics(there / "s" / "a" / "seed1")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert rows


def test_tar_that_says_1_renews_and_2_keeps_the_last_archive(tmp_path: Path) -> None:
    """With a `tar` of ours, which says what the real one does on a bad day."""
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "a").write_text("1")
    program = 'source experiments/kernels/env.sh; tar() { command tar "$@"; return $SAYS; }; '
    program += 'packed "$OUT/s.tar.gz" "$OUT/runs" s 2>&1 || echo kept'
    assert bash(program, tmp_path, SAYS="1") == ""
    before = (tmp_path / "s.tar.gz").read_bytes()
    said = bash(program, tmp_path, SAYS="2")
    assert said.split("\n")[0].endswith("was not renewed")
    assert "kept" in said
    assert (tmp_path / "s.tar.gz").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "s.tar.gz"]


def test_a_summary_in_an_archive_comes_before_the_rest(tmp_path: Path) -> None:
    """Who has one is whole: its steps were written before it was packed."""
    run = tmp_path / "runs" / "s" / "a" / "seed1"
    run.mkdir(parents=True)
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        (run / name).write_text("")
    bash('source experiments/kernels/env.sh; packed "$OUT/s.tar.gz" "$OUT/runs" s', tmp_path)
    with tarfile.open(tmp_path / "s.tar.gz") as file:
        names = [name for name in file.getnames() if "." in name]
    assert names[0] == "s/a/seed1/summary.json"
    assert len(names) == len(set(names)) == 3


def wheel(folder: Path, name: str, tag: str, version: str = "1.0") -> None:
    """A wheel of one module, which says its version."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


def test_of_carried_wheels_those_that_fit_and_are_missing_are_installed(tmp_path: Path) -> None:
    """Others neither stop the script nor say anything, unless the package is nowhere."""
    carried = tmp_path / ".whl"
    foreign = "cp39-cp39-win32"
    wheel(carried, "zpp_try_here", "py3-none-any")
    wheel(carried, "numpy", foreign)  # installed here
    program = f"source {ROOT}/experiments/kernels/env.sh; cd $OUT; ln -sfn {ROOT}/experiments . ; "
    program += 'unpack .whl .site 2>&1; python3 -c "import zpp_try_here as z; print(z.version)"'
    assert bash(program, tmp_path) == "1.0\n"
    assert bash(program, tmp_path) == "1.0\n"
    assert not list((tmp_path / ".site").glob("numpy*"))
    (carried / "zpp_try_here-1.0-py3-none-any.whl").unlink()
    wheel(carried, "zpp_try_here", "py3-none-any", "1.10")  # longer: its bytecode is another's
    assert bash(program, tmp_path) == "1.10\n"
    wheel(carried, "zpp_try_nowhere", foreign)
    said = ".whl: zpp-try-nowhere is not installed, and no wheel of it is for this machine\n"
    assert bash(program, tmp_path) == said + "1.10\n"


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
