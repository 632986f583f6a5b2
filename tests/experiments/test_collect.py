"""Archives of a study's pieces, put together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments" / "collect.py"
KEEP = SCRIPT.parent / "reference" / "keep.py"


def write_run(folder: Path, losses: list[float], *, finished: bool = True, data: str = "d") -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    rows = [{"step": i + 1, "loss": x, "seconds": hash(folder)} for i, x in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "heldout.json").write_text("{}\n")
        last = {"loss": losses[-1], "heldout_loss": 2.0, "heldout_loss_master": 2.0}
        summary = {"steps": len(losses), "tokens": 8, "bytes": {}, "data": {"hash": data}, **last}
        (folder / "summary.json").write_text(json.dumps(summary))


def packed(root: Path, name: str) -> Path:
    """The study in root/name/s as an archive."""
    (root / name / "s" / "study.yaml").write_text(f"# {name}\n")
    archive = root / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(root / name / "s", "s")
    return archive


def collect(target: Path, *archives: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), str(target), *map(str, archives)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_runs_that_differ_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "s" / "zero3" / "seed1", [3.0, 2.0])
    write_run(tmp_path / "two" / "s" / "zero3" / "seed1", [3.0, 2.0000001])
    done = collect(tmp_path / "all", packed(tmp_path, "one"), packed(tmp_path, "two"))
    assert done.returncode == 1
    assert "zero3/seed1 finished twice and differs: step 2: loss; summary: loss" in done.stderr
    assert not (tmp_path / "all").exists()


def test_a_run_that_writes_accuracy_equals_an_older_one_and_is_kept(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_run(tmp_path / name / "s" / "zero3" / "seed1", [3.0, 2.0])
    for name, share in (("two", 0.5), ("three", 0.25)):
        run = tmp_path / name / "s" / "zero3" / "seed1"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[1]["heldout_accuracy"] = share
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "heldout.json").write_text(json.dumps({"correct": [share * 8]}))
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "heldout_accuracy": share}))
    archives = [packed(tmp_path, name) for name in ("one", "two", "three")]
    done = collect(tmp_path / "all", *archives[:2])
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "all" / "zero3" / "seed1" / "summary.json").read_text())
    assert kept["heldout_accuracy"] == 0.5
    done = collect(tmp_path / "other", *archives[1:])
    assert done.returncode == 1
    assert "step 2: heldout_accuracy; heldout.json" in done.stderr


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "s" / "zero3" / "seed1", [3.0])
    write_run(tmp_path / "two" / "s" / "w8" / "seed1", [3.0], data="other")
    done = collect(tmp_path / "all", packed(tmp_path, "one"), packed(tmp_path, "two"))
    assert done.returncode == 1
    assert "different tokens" in done.stderr


def test_archives_that_are_cut_or_something_else_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "s" / "zero3" / "seed1", [3.0])
    archive = packed(tmp_path, "one")
    whole = archive.read_bytes()
    for content in (whole[:-40], whole[:5], b""):
        archive.write_bytes(content)
        done = collect(tmp_path / "all", archive)
        assert done.returncode == 1
        assert "one.tar.gz is no whole archive" in done.stderr
        assert "Traceback" not in done.stderr
    done = collect(tmp_path / "all", tmp_path / "none.tar.gz")
    assert "none.tar.gz is no whole archive" in done.stderr
    (tmp_path / "two").mkdir()
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as file:
        file.add(tmp_path / "two", "two")
    assert "holds 0 studies" in collect(tmp_path / "all", tmp_path / "two.tar.gz").stderr
    assert not (tmp_path / "all").exists()


def test_a_study_is_taken_from_an_archive_of_several(tmp_path: Path) -> None:
    for study in ("s", "other"):
        write_run(tmp_path / "one" / study / "zero3" / "seed1", [3.0])
        (tmp_path / "one" / study / "study.yaml").write_text("")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as file:
        file.add(tmp_path / "one", "")
    for wrong in (tmp_path / "one.tar.gz", tmp_path / "one.tar.gz" / "t"):
        refused = collect(tmp_path / "all", wrong)
        assert refused.returncode == 1
        assert "one.tar.gz/other or " in refused.stderr
    assert collect(tmp_path / "all", tmp_path / "one.tar.gz" / "s").returncode == 0
    assert (tmp_path / "all" / "zero3" / "seed1" / "summary.json").is_file()


def test_runs_are_kept_in_the_archive_that_has_their_study(tmp_path: Path) -> None:
    kept, archive = tmp_path / "kept", tmp_path / "kept" / "s.tar.xz"
    for study in ("s", "other"):
        write_run(kept / study / "zero3" / "seed1", [3.0])
        (kept / study / "study.yaml").write_text("")
    with tarfile.open(archive, "w:xz") as file:
        for study in ("s", "other"):
            file.add(kept / study, study)
    for study in ("s", "other", "new"):  # a file of its own is for a study that none has
        write_run(tmp_path / study / "s" / "w8" / "seed1", [2.0])
        (tmp_path / study / "s" / "study.yaml").write_text("")
        with tarfile.open(tmp_path / f"{study}.tar.gz", "w:gz") as file:
            file.add(tmp_path / study / "s", study)
    words = [sys.executable, str(KEEP), str(tmp_path)]
    subprocess.run(words, env=os.environ | {"RUNS": str(kept)}, check=True)
    ends = {}
    for path in kept.glob("*.tar.xz"):
        with tarfile.open(path) as file:
            ends[path.name] = sorted(n for n in file.getnames() if n.endswith("summary.json"))
    both = [f"{s}/{arm}/seed1/summary.json" for s in ("other", "s") for arm in ("w8", "zero3")]
    assert ends == {"s.tar.xz": both, "new.tar.xz": ["new/w8/seed1/summary.json"]}
