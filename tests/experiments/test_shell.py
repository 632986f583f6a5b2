"""What the experiments' scripts share: whole archives, and ranks that end with their script."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

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


def test_any_arm_can_be_timed_beside_the_twins(tmp_path: Path) -> None:
    """OWN has names of the script's arms, recipes, and NAME: OVERRIDES behind a semicolon."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/bash\ncase "$*" in\n*"bench step"*) printf "%s\\n" "$@" > "$OUT/words" ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    program = 'PATH="$OUT/bin:$PATH" bash experiments/speed/run.sh "$OUT" twins'
    bash(program, tmp_path, OWN="diff_g84h zeropp; mine: recipe=w4 recipe.hops=2")
    words = (tmp_path / "words").read_text().splitlines()
    own = [after for word, after in pairwise(words) if word == "--arm"]
    assert own[0].startswith("diff_g84h: ")
    assert own[1:] == ["zeropp", "mine: recipe=w4 recipe.hops=2"]
    assert words[words.index("--recipes") + 1] == "fsdp2,fsdp2+node,hsdp"


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
