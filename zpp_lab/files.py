"""Files that are either whole or absent.

A run can be killed at any moment, and other processes read its folder while it
works: whoever opens `summary.json` must find all of it or none.
"""

from __future__ import annotations

import contextlib
import errno
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
    """The mapping in a YAML file, {} of an empty one. FileNotFoundError, or ValueError that names a
    damaged file and the way out."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a study has many
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged(path, error) from None
    if found is not None and not isinstance(found, dict):
        raise damaged(path, "no mapping")
    return found or {}


def damaged(path: Path, why: object) -> ValueError:
    """What to raise for a file of ours that does not hold what was written. Each is whole or
    absent, so this is the disk's or somebody's doing; without it a run goes on or starts over."""
    return ValueError(
        f"{path} is damaged ({' '.join(str(why).split())}): restore it from a copy, or delete it"
    )


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
