"""Puts the archives of a study's pieces together: `collect.py FOLDER ARCHIVE...`

Each archive holds the small files of a study's runs (run.sh packs them); ARCHIVE/NAME is study NAME
in an archive of several. FOLDER becomes one study, for `zpp-lab report FOLDER`. A run may be in
several archives: a finished one counts before an unfinished one, then the one with more steps. Runs
that finished twice must be equal, and all runs of arms must have seen the same tokens; otherwise
nothing is written and the exit code is 1. Base runs (prepare/) are collected the same way.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from same_run import differences

PREPARE = "prepare"  # zpp_lab.config.study's; this file needs no package


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    target, archives = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            studies = [unpacked(a, Path(temporary, str(i))) for i, a in enumerate(archives)]
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        known = [target] if (target / "study.yaml").is_file() else []
        best, faults = chosen([*known, *studies])
        faults += other_tokens(run for name, run in best.items() if not name.startswith(PREPARE))
        for fault in faults:
            print(fault, file=sys.stderr)
        if faults:
            return 1
        write(target, best, studies[-1])
    for name in sorted(best):
        print(f"{name}: {steps(target / name)} steps{', finished' if done(target / name) else ''}")
    return 0


def unpacked(given: Path, folder: Path) -> Path:
    """The archive's one folder, which is a study's, or the one named. ValueError for another, or
    one cut short."""
    archive, name = (given.parent, given.name) if given.parent.is_file() else (given, "")
    try:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{archive} is no whole archive ({error}): fetch it again") from None
    every = [path for path in sorted(folder.iterdir()) if (path / "study.yaml").is_file()]
    found = [path for path in every if name in ("", path.name)]
    if len(found) != 1:
        names = " or ".join(f"{archive}/{path.name}" for path in every)
        raise ValueError(
            f"{given} holds {len(found)} studies; give {names or 'what run.sh has packed'}"
        )
    return found[0]


def chosen(studies: Iterable[Path]) -> tuple[dict[str, Path], list[str]]:
    """Run ("arm/seed1", "prepare/base") → the folder to keep; and what forbids that."""
    best: dict[str, Path] = {}
    faults: list[str] = []
    for study in studies:
        for config in sorted(study.glob("*/*/config.yaml")):
            folder = config.parent
            if folder.parent.name != PREPARE and not folder.name.startswith("seed"):
                continue
            name = folder.relative_to(study).as_posix()
            if name not in best:
                best[name] = folder
                continue
            if done(folder) and done(best[name]):
                found = differences(best[name], folder)
                faults += (
                    [f"{name} finished twice and differs: {'; '.join(found)}"] if found else []
                )
                if has_accuracy(folder) and not has_accuracy(best[name]):
                    best[name] = folder
            elif rank(folder) > rank(best[name]):
                best[name] = folder
    return best, faults


def other_tokens(runs: Iterable[Path]) -> list[str]:
    """A fault when finished runs have not all had the same data."""
    hashes = {}
    for run in runs:
        if done(run):
            summary = json.loads((run / "summary.json").read_text())
            hashes.setdefault(summary["data"]["hash"], run)
    if len(hashes) < 2:
        return []
    listed = ", ".join(f"{run.parent.name}/{run.name} {h[:12]}" for h, run in hashes.items())
    return [f"the runs have had different tokens: {listed}"]


def write(target: Path, best: dict[str, Path], newest: Path) -> None:
    for name, folder in best.items():
        place = target / name
        if folder != place:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder, place)
    for file in newest.iterdir():
        if file.is_file():
            shutil.copy(file, target / file.name)


def rank(run: Path) -> tuple[bool, int]:
    return done(run), steps(run)


def done(run: Path) -> bool:
    return (run / "summary.json").is_file()


def has_accuracy(run: Path) -> bool:
    """False for a run of an older commit, which wrote less of the same result."""
    return "heldout_accuracy" in json.loads((run / "summary.json").read_text())


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


if __name__ == "__main__":
    sys.exit(main())
