"""Which text a run learns from: Python source, files, or a Hugging Face dataset.

A corpus lists its documents in a fixed order and has an identity that is cheap
to compute (names, sizes and times of files, never their contents), so that
prepared tokens are found again without reading the text.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from zpp_lab import files as hub
from zpp_lab.files import missing, package

# The standard library's own tests and installed packages are left out.
_STDLIB_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus(Protocol):
    """Documents in a fixed order. `count` is None when it is known only after reading them."""

    @property
    def count(self) -> int | None: ...

    def identity(self) -> dict[str, Any]:
        """Return JSON-able values; equal identities mean the same documents."""

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, text), never empty, free of zero bytes; ValueError if unreadable."""


@dataclass(frozen=True)
class File:
    name: str  # relative to the corpus' root, with forward slashes
    size: int  # bytes on disk
    mtime_ns: int
    take: int  # bytes that the corpus uses, from the start


@dataclass(frozen=True)
class FileCorpus:
    """Files below `root`, one document each, ordered by name. A file with zero bytes is an error,
    or left out with `skip_binary`."""

    root: Path
    files: tuple[File, ...]
    skip_binary: bool = False

    @property
    def count(self) -> int | None:
        return None if self.skip_binary else len(self.files)

    def identity(self) -> dict[str, Any]:
        listed = [[f.name, f.size, f.mtime_ns, f.take] for f in self.files]
        return {"root": str(self.root), "files": listed}

    def documents(self) -> Iterator[tuple[str, bytes]]:
        for file in self.files:
            content = self._read(file)
            if content:
                yield file.name, content

    def _read(self, file: File) -> bytes:
        path = self.root / file.name
        try:
            with open(path, "rb") as stream:
                content = stream.read(file.take)
        except OSError as error:
            raise _unreadable(path, error) from None
        if len(content) != file.take:
            raise ValueError(f"data: {path} changed while it was read: run again")
        if b"\0" in content:
            if self.skip_binary:
                return b""
            raise ValueError(
                f"data: {path} contains zero bytes, so it is not UTF-8 text: move it away, or "
                "convert it to UTF-8 if it is text in UTF-16 or UTF-32"
            )
        return content


def stdlib_corpus(max_bytes: int = 0) -> FileCorpus:
    """Open the Python standard library's source: *.py, without its tests and installed packages.
    `_sysconfigdata*`, which the build writes for one machine, is left out too."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _scan(
        root,
        keep=lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"),
        enter=lambda name: name not in _STDLIB_SKIPS,
    )
    if not files:
        raise ValueError(f"data.name=stdlib: no source in {root}: use data=text with data.path")
    return FileCorpus(root, _cut(files, max_bytes))


@dataclass(frozen=True)
class JoinedCorpus:
    """Several folders' files one after the other; a document's name starts with its folder's."""

    parts: tuple[tuple[str, FileCorpus], ...]

    @property
    def count(self) -> int | None:
        counts = [part.count for _, part in self.parts]
        return None if None in counts else sum(c for c in counts if c is not None)

    def identity(self) -> dict[str, Any]:
        return {name: part.identity() for name, part in self.parts}

    def documents(self) -> Iterator[tuple[str, bytes]]:
        for name, part in self.parts:
            for document, content in part.documents():
                yield f"{name}/{document}", content


def installation_corpus(
    extra: Path | None = None, max_bytes: int = 0, suffixes: tuple[str, ...] = (".py",)
) -> JoinedCorpus:
    """Open all files of the running installation that end in one of `suffixes`: of its standard
    library without that one's tests, of the packages installed next to it and next to torch, and
    below `extra`. Binary files are left out."""
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"]), "packages": Path(paths["purelib"])}
    shared = _beside_torch()
    if shared is not None and shared.resolve() != roots["packages"].resolve():
        roots["shared"] = shared
    if extra is not None:
        if not extra.expanduser().is_dir():
            raise ValueError(f"data.path={extra}: {missing(extra.expanduser())}")
        roots["extra"] = extra.expanduser().resolve()
    parts: list[tuple[str, FileCorpus]] = []
    for name, root in roots.items():
        used = sum(file.take for _, part in parts for file in part.files)
        if max_bytes and used >= max_bytes:
            break
        skips = _STDLIB_SKIPS if name == "stdlib" else {"__pycache__"}
        files = _scan(root, lambda n: n.endswith(suffixes), partial(_not_in, skips))
        kept = _cut(files, max_bytes - used if max_bytes else 0)
        parts.append((name, FileCorpus(root, kept, skip_binary=True)))
    if not any(part.files for _, part in parts):
        raise ValueError(
            f"data.name=installation: no files with data.suffixes=[{','.join(suffixes)}] found; "
            "set other data.suffixes, or use data=text data.path"
        )
    return JoinedCorpus(tuple(parts))


def _beside_torch() -> Path | None:
    """Return the folder of packages in which torch is installed. A virtual environment that sees
    those of the installation below it (--system-site-packages) has hardly any of its own."""
    torch = find_spec("torch")
    folder = Path(torch.origin).parents[1] if torch and torch.origin else None
    packages = folder and folder.name in ("site-packages", "dist-packages")
    return folder if packages else None  # a build from source lies in a tree of its own


def text_corpus(path: Path, max_bytes: int = 0, suffix: str = "") -> FileCorpus:
    """Open one file, or every file below a folder but hidden ones (names that start with a dot). In
    a folder only files that end in `suffix`. Empty files are skipped; links to files are followed,
    links to folders are not."""
    path = path.expanduser().resolve()
    if path.is_file():
        root, files = path.parent, _stat(path.parent, [path.name])
    elif path.is_dir():
        root = path
        files = _scan(path, lambda n: _visible(n) and n.endswith(suffix), enter=_visible)
    else:
        raise ValueError(f"data.path={path}: {missing(path, 'file or folder')}")
    if not files:
        what = f"no *{suffix} file" if suffix else "no text"
        raise ValueError(
            f"data.path={path}: {what} found there (empty and hidden files do not count); set "
            f"another {'file or folder' if suffix else 'folder'}"
        )
    return FileCorpus(root, _cut(files, max_bytes))


def _not_in(skips: set[str], name: str) -> bool:
    return name not in skips


def _visible(name: str) -> bool:
    return not name.startswith(".")


def _scan(root: Path, keep: Callable[[str], bool], enter: Callable[[str], bool]) -> list[File]:
    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error)

    names: list[str] = []
    for folder, folders, found in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if enter(name)]
        names += [(Path(folder, n).relative_to(root)).as_posix() for n in found if keep(n)]
    return _stat(root, sorted(names))


def _stat(root: Path, names: list[str]) -> list[File]:
    files = []
    for name in names:
        try:
            status = os.stat(root / name)
        except OSError as error:
            raise _unreadable(root / name, error) from None
        if stat.S_ISREG(status.st_mode) and status.st_size:
            files.append(File(name, status.st_size, status.st_mtime_ns, status.st_size))
    return files


def _cut(files: list[File], max_bytes: int) -> tuple[File, ...]:
    """Take the first `max_bytes` bytes of all files in order (0: all), the last file in part."""
    if not max_bytes:
        return tuple(files)
    kept, left = [], max_bytes
    for file in files:
        if left:
            kept.append(File(file.name, file.size, file.mtime_ns, min(file.size, left)))
            left -= kept[-1].take
    return tuple(kept)


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"data: cannot read {path}: {error.strerror or error}; repair or remove it")


@dataclass(frozen=True)
class HubCorpus:
    """Rows of a Hugging Face dataset, streamed; a row's text is one document. Zero bytes in rows
    are dropped. The identity is the dataset's name, not its content: tokens once prepared stay the
    same and need no network."""

    path: str
    subset: str | None
    split: str
    column: str
    max_bytes: int

    @property
    def count(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        names = {"path": self.path, "subset": self.subset, "split": self.split}
        return names | {"column": self.column, "max_bytes": self.max_bytes}

    def documents(self) -> Iterator[tuple[str, bytes]]:
        left = self.max_bytes or None
        for index, row in enumerate(self._rows()):
            content = self._text(row).replace("\0", "").encode(errors="replace")[:left]
            if content:
                yield f"row {index}", content
            if left is not None:
                left -= len(content)
                if not left:
                    return

    def _text(self, row: dict[str, Any]) -> str:
        value = row.get(self.column)
        if not isinstance(value, str):
            names = ", ".join(k for k, v in row.items() if isinstance(v, str))
            raise ValueError(
                f"data.column={self.column} of {self.path} has no text; valid: {names or 'none'}"
            )
        return value

    def _rows(self) -> Iterator[dict[str, Any]]:
        datasets = package("datasets", "data.name=hf")
        if not Path(self.path).exists() and not hub.reachable():
            raise ValueError(
                f"data.path={self.path}: {missing(Path(self.path))}, and {hub.why_not()}: where "
                f"there is a network, `hf download {self.path} --repo-type dataset --local-dir "
                "FOLDER`, then data.path=FOLDER here"
            )
        try:
            names = self.path, self.subset
            yield from datasets.load_dataset(*names, split=self.split, streaming=True)
        except (OSError, ValueError) as error:  # not found, no network, no such subset or split
            raise ValueError(
                f"data.path={self.path} data.subset={self.subset} data.split={self.split}: {error}"
            ) from None
