"""Files that are either whole or absent.

A run can be killed at any moment, and other processes read its folder while it
works: whoever opens `summary.json` must find all of it or none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, of one's share, of one file


def write_atomic(path: Path | str, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step, on the disk when this returns.

    Raises OSError, naming the file, when it cannot be written; what was there before stays.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of ours. FileNotFoundError, or ValueError that names a damaged
    file and the way out."""
    found = parse_yaml(path)
    if not isinstance(found, dict):
        raise damaged(path, "no mapping")
    return found


RESTORE = "restore it from a copy, or delete it"


def read_text(path: Path, fix: str = RESTORE) -> str:
    """A file's text. OSError, or ValueError that names the file and `fix` where it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(
            path, f"no text in UTF-8: {error.reason} at byte {error.start}", fix
        ) from None


def parse_json(path: Path, fix: str = RESTORE) -> Any:
    """What a JSON file holds. OSError, or ValueError that names the file and `fix`."""
    try:
        return json.loads(read_text(path, fix))
    except json.JSONDecodeError as error:
        raise damaged(path, f"no JSON: {error}", fix) from None


def parse_yaml(path: Path, fix: str = RESTORE) -> Any:
    """What a YAML file holds, whose mappings name nothing twice. Errors as of `parse_json`."""
    try:
        return yaml.load(read_text(path, fix), Loader=_Loader)
    except yaml.YAMLError as error:
        raise damaged(path, f"no YAML: {error}", fix) from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses what YAML forbids and its loader takes: of two equal names, the second silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag.endswith(":str")]
        for name in {n for n in names if names.count(n) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"{name!r} is there twice", node.start_mark
            )
        return dict(super().construct_mapping(node, deep))


def damaged(path: Path, why: object, fix: str = RESTORE) -> ValueError:
    """What to raise for a file that does not hold what it should. One of ours is whole or absent,
    so this is the disk's or somebody's doing; without it a run goes on or starts over."""
    return ValueError(f"{path} is damaged ({' '.join(str(why).split())}): {fix}")


def sync_folder(folder: Path) -> None:
    """Put the folder's own entries on the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def need_space(folder: Path, nbytes: int) -> None:
    """OSError (ENOSPC) with both numbers when `folder`'s disk has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"{nbytes:,} bytes ({nbytes / 2**30:.2f} GiB) are needed in {folder} and {free:,} "
            f"({free / 2**30:.2f} GiB) are free",
        )


def is_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, was full, or a file at its limit (ulimit -f)."""
    return isinstance(error, OSError) and error.errno in FULL
