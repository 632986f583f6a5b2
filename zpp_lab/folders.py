"""Folders and files that a user names: is it there, and if not, which one was meant?"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

_FOLDER_NAME = re.compile(r"[\w,+=-][\w.,+=-]*")  # what begins with a dot is hidden
_SHOWN = 5  # names that are listed where none is similar


def looks_like_folder(text: str) -> bool:
    """Whether `text` means a path of this machine, not a name on the Hugging Face Hub, which is
    NAME or OWNER/NAME."""
    begins = text in (".", "..") or text.startswith(("/", "./", "../", "~"))
    if begins or text.endswith("/") or text.count("/") > 1:
        return True
    path = Path(text)
    return path.exists() or ("/" in text and path.parent.is_dir())


def nearest(path: Path) -> Path | None:
    """The existing path whose name is most like that of the part of `path` that is missing."""
    parts = [path, *path.parents]
    last = next((i for i, part in enumerate(parts) if i and part.is_dir()), None)
    if last is None:
        return None
    there, gone = parts[last], parts[last - 1]
    near = difflib.get_close_matches(gone.name, _names(there), n=1)
    if not near:
        return None
    whole = there / near[0] / path.relative_to(gone)
    return whole if whole.exists() else there / near[0]


def _names(folder: Path) -> list[str]:
    """None of a folder that this user may not read."""
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []


def missing(path: Path, what: str = "folder") -> str:
    """What to say of a path that is not there, with what may have been meant."""
    if path.is_file() and what == "folder":
        return "a file, not a folder"
    near = nearest(path)
    if near is not None and near != path:
        return f"no such {what} (did you mean {near}?)"
    there = next((p for p in path.parents if p.is_dir()), None)
    if there is None or there == Path():
        return f"no such {what} in {Path.cwd()}" if not path.is_absolute() else f"no such {what}"
    names = [name for name in _names(there) if not name.startswith(".")]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"no such {what}; in {there}: {', '.join(names[:_SHOWN]) or 'nothing'}{more}"


def check_name(name: str) -> None:
    """ValueError when a study's, arm's, run's or recipe's name cannot be that of a folder just
    below the one for it."""
    if not _FOLDER_NAME.fullmatch(name):
        raise ValueError(
            "its name is that of a folder; use letters, digits and _ . , + = -, no dot first"
        )


def need_folder(named: str, path: Path, fix: str) -> None:
    """ValueError, beginning with `named` and ending with `fix`, when `path` is no folder."""
    if not path.is_dir():
        raise ValueError(f"{named}: {missing(path)}; {fix}")


def below(folder: Path, mark: str) -> str:
    """A question that names the folders just below that hold `mark`; "" where there are none."""
    if not folder.is_dir():
        return ""
    found = sorted(str(p.parent) for p in folder.glob(f"*/{mark}"))[:_SHOWN]
    return f" (did you mean {' or '.join(found)}?)" if found else ""
