"""Puts what a call brought back to the kept runs: `keep.py OUT...`

OUT is run.sh's folder, with an archive of each study. experiments/reference/NAME.tar.xz then has
every run of study NAME that ended, which run.sh and the report go by, or the archive of several
studies that has NAME; a run that is there twice must be equal, and all of a study must have read
the same tokens (../collect.py). RUNS: another folder of such archives, such as a rehearsal's.
../archives.csv then has their hashes.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
KEPT = Path(os.environ.get("RUNS", HERE))


def main() -> int:
    given = [path for word in sys.argv[1:] for path in sorted(Path(word).glob("*.tar.gz"))]
    studies = sorted({path.name.removesuffix(".tar.gz") for path in given})
    ends = [kept(s, [p for p in given if p.name == f"{s}.tar.gz"]) for s in studies]
    if KEPT == HERE:
        subprocess.run([sys.executable, str(HERE.parent / "publish.py"), "--archives"], check=True)
    return max(ends, default=0)


def kept(study: str, archives: list[Path]) -> int:
    target = archive_of(study)
    with tempfile.TemporaryDirectory() as temporary:
        unpack = ["tar", "xJf", str(target), "-C", temporary]
        if target.is_file() and (code := subprocess.run(unpack, check=False).returncode):
            return code
        there = set(Path(temporary).rglob("*"))
        words = [sys.executable, str(HERE.parent / "collect.py"), str(Path(temporary, study))]
        done = subprocess.run(
            [*words, *map(str, archives)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stderr, end="", file=sys.stderr)
            return done.returncode
        return pack(Path(temporary), target, there)


def archive_of(study: str) -> Path:
    """Where the study's runs are, or are to be."""
    own = KEPT / f"{study}.tar.xz"
    for path in [] if own.is_file() else sorted(KEPT.glob("*.tar.xz")):
        with tarfile.open(path) as tar:
            if any(name.split("/")[0] == study for name in tar.getnames()):
                return path
    return own


def pack(root: Path, target: Path, there: set[Path]) -> int:
    """`there`: what was kept before, unfinished runs too, and stays."""
    part = target.with_suffix(".part")
    with tarfile.open(part, "w:xz", preset=9 | lzma.PRESET_EXTREME) as tar:
        # files of one name next to each other: 4 % smaller
        for path in sorted(root.rglob("*"), key=lambda path: (path.name, path)):
            if path.is_file() and (path in there or ended(root, path)):
                tar.add(path, path.relative_to(root), filter=plain)
    part.replace(target)
    runs = {path.parent for path in root.glob("*/*/seed*/*") if ended(root, path)}
    print(f"{len(runs)} runs, {target}: {target.stat().st_size / 1e6:.2f} MB")
    return 0


def ended(root: Path, path: Path) -> bool:
    """Whether the file is a study's own, or of a run that ended."""
    folder = path.parent
    ends = (folder / "summary.json", folder / "failure.json")
    return folder.parent == root or any(end.is_file() for end in ends)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.exit(main())
