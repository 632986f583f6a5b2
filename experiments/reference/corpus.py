"""The corpus of the reference study: Python source of packages that constraints.txt pins.

    python experiments/reference/corpus.py make FOLDER     of what is installed, corpus.tar.xz
    python experiments/reference/corpus.py unpack FILE TO  its files below TO, once
    python experiments/reference/corpus.py tokenizer TO    tokenizer.json beside this file: a BPE of
                                                           4096, from every 8th training file

The archive's text is the same wherever it is made: files by name, each content once, no times. Its
sha256 is pinned beside this file in corpus.sha256, and text with another one is refused: a run on
other text would be no run of this study.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import shutil
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

HERE = Path(__file__).parent
PINNED = HERE / "corpus.sha256"
PACKAGES = (  # most text first; as long as their files are the same on every platform
    "torch",
    "sympy",
    "pandas",
    "scipy",
    "statsmodels",
    "numpy",
    "networkx",
    "mypy",
    "wandb",
    "altair",
    "huggingface_hub",
    "playwright",
    "narwhals",
    "hypothesis",
    "mpmath",
    "pydantic",
)
WRITTEN_BY_BUILDS = re.compile(r"(version|_version|__config__|_distributor_init\w*)\.py$")
MOST = 300_000  # bytes of a file; longer ones are tables
NUMBERS = 0.2  # share of digits above which a file is a table


def main() -> int:
    command, *rest = sys.argv[1:]
    if command == "make":
        return make(Path(rest[0]))
    if command == "tokenizer":
        return tokenizer(Path(rest[0]))
    return unpack(Path(rest[0]), Path(rest[1]))


def make(folder: Path) -> int:
    files = source()
    text = archive(files)
    found = hashlib.sha256(text).hexdigest()
    print(f"{len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB, sha256 {found}")
    if PINNED.is_file() and PINNED.read_text().split()[0] != found:
        print(f"{PINNED} has another sha256: install what constraints.txt pins", file=sys.stderr)
        return 1
    PINNED.write_text(f"{found}  corpus.tar\n")
    folder.mkdir(parents=True, exist_ok=True)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
    packed = lzma.compress(text, lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)
    (folder / "corpus.tar.xz").write_bytes(packed)
    print(f"{folder / 'corpus.tar.xz'}: {len(packed) / 1e6:.1f} MB")
    return 0


def source() -> dict[str, bytes]:
    """Name → content, by name; each content once, under the first of its names."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", Path("constraints.txt").read_text(), re.M))
    found: dict[str, bytes] = {}
    for package in PACKAGES:
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            raise SystemExit(f"{package} is not installed: make setup-dev") from None
        if installed.version.partition("+")[0] != pins[package]:
            raise SystemExit(f"{package} {installed.version}: constraints.txt has {pins[package]}")
        for file in installed.files or ():
            if (
                file.suffix == ".py"
                and ".." not in file.parts
                and not WRITTEN_BY_BUILDS.search(str(file))
            ):
                content = Path(str(file.locate())).read_bytes()
                if is_source(content):
                    found[file.as_posix()] = content
    kept, seen = {}, set()
    for name in sorted(found):
        if found[name] not in seen:
            kept[name] = found[name]
            seen.add(found[name])
    return kept


def is_source(content: bytes) -> bool:
    if not 0 < len(content) <= MOST or b"\0" in content:
        return False
    digits = sum(content.count(str(digit).encode()) for digit in range(10))
    return digits <= NUMBERS * len(content)


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), 0, 0o644
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def unpack(file: Path, to: Path) -> int:
    pinned = PINNED.read_text().split()[0]
    mark = to.parent / f"{to.name}.sha256"
    if to.is_dir() and mark.is_file() and mark.read_text() == pinned:
        return 0
    text = lzma.decompress(file.read_bytes())
    found = hashlib.sha256(text).hexdigest()
    if found != pinned:
        print(f"{file} is another corpus: {found}, {PINNED} has {pinned}", file=sys.stderr)
        return 1
    work = to.parent / f".{to.name}.{os.getpid()}"
    with tarfile.open(fileobj=io.BytesIO(text)) as tar:
        tar.extractall(work, filter="data")
    shutil.rmtree(to, ignore_errors=True)
    work.rename(to)
    mark.write_text(pinned)
    return 0


def tokenizer(to: Path) -> int:
    from zpp_lab.config.data import DataConfig
    from zpp_lab.data.corpus import open_corpus
    from zpp_lab.data.prepare import parts
    from zpp_lab.data.tokenizer import BpeTokenizer

    cfg = DataConfig("text", path=str(to))
    texts = [text for _, split, text in parts(open_corpus(cfg), cfg) if split == "train"]
    (HERE / "tokenizer.json").write_text(BpeTokenizer.train(texts[::8], 4096).dumps())
    return 0


if __name__ == "__main__":
    sys.exit(main())
