"""Files and folders that users give and runs share: paths, names, locks, whole writes.

A run can be killed at any moment, and other processes read its folder while it works: a reader of
`summary.json` must find all of it or none (`write_atomic`). A folder or file that a user names
exists, or the error says which one was probably meant.

A folder's lock shows that a process works in it; the kernel frees it when the process dies. A study
holds its folder and a run's process the run's (of several ranks one process for all), so that
nothing runs twice and another terminal sees what is running. Some file systems have no such locks
(Lustre unless mounted with flock, NFS without its lock service). Work continues there, after a line
that says what is lost.

Also here: where conf/ and cuda/ lie (in an installed wheel, or next to the package in a checkout),
tables for a terminal without the packages of the report, and whether the Hugging Face Hub can be
reached, as its own clients try for most of a minute.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

# What lies in a run's folder, and of a study's own
CONFIG, SUMMARY, FAILURE = "config.yaml", "summary.json", "failure.json"
METRICS, HELDOUT, LOG = "metrics.jsonl", "heldout.json", "log.txt"
COMPLETIONS = "completions.jsonl"  # examples of task=rl
QUEUED = "queued"  # the step after which the run's Slurm job was queued again
CONSOLE = "console.log"  # of a run by itself; a study keeps all that its process says in LOG
STUDY_FILE = "study.yaml"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, of one's share, of one file
RESTORE = "restore it from a copy, or delete it"
RESTORE_CONFIG = "restore it from a copy, or move its folder away"  # it tells whose the rest is

OWN_CONF = "ZPP_CONFIG_DIR"  # set by --config-dir, for the processes that a command starts too
BEGIN_WITH = {  # of long lists; README says what each is for
    "recipe": ("zero3", "zeropp", "diff_g84h"),
    "study": ("first", "memories_first", "finetune_350m"),
}
_PACKAGE = Path(__file__).resolve().parent
_FOLDER_NAME = re.compile(r"[\w,+=-][\w.,+=-]*")  # what begins with a dot is hidden
_WIDTH = 100  # of a table in a terminal
_NARROW = 12  # of its columns of words, at least
_SHOWN = 5  # names in a folder that are listed where none is similar

LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_GLANCE = 0.5  # seconds; `held` of another process has the lock for a moment
_LOOK = 0.05  # seconds between two attempts at a lock

SECONDS = 3.0  # to wait for an answer of the Hub
_ENDPOINT = "https://huggingface.co"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def write_atomic(path: Path | str, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step, on the disk when this returns. Raises OSError,
    naming the file, when it cannot be written; what was there before stays."""
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


def remove_unwritten(folder: Path) -> None:
    """Remove what `write_atomic` has left in `folder` where its process was killed."""
    for left in folder.glob(".*.tmp"):
        writer = left.name.split(".")[-2]
        if not (writer.isdecimal() and _lives(int(writer))):
            left.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file of ours. FileNotFoundError, or ValueError if damaged."""
    found = parse_yaml(path)
    if not isinstance(found, dict):
        raise damaged(path, "no mapping")
    return found


def read_text(path: Path, fix: str = RESTORE) -> str:
    """Read a file's text. OSError, or ValueError that ends with `fix` where it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 text: {error.reason} at byte {error.start}", fix) from None


def parse_json(path: Path, fix: str = RESTORE, once: bool = False) -> Any:
    """Parse a JSON file. OSError, or ValueError that ends with `fix`. `once`: refuse equal
    names."""
    text = read_text(path, fix)
    try:
        return json.loads(text, object_pairs_hook=named_once if once else None)
    except ValueError as error:
        raise damaged(path, f"invalid JSON: {error}", fix) from None


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of `pairs`; ValueError for two of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return found


def parse_yaml(path: Path, fix: str = RESTORE) -> Any:
    """Parse a YAML file whose mappings name nothing twice. Errors as of `parse_json`."""
    try:
        return yaml.load(read_text(path, fix), Loader=_Loader)
    except yaml.YAMLError as error:
        raise damaged(path, f"invalid YAML: {error}", fix) from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses what YAML forbids and its loader takes: of two equal names, the second silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag.endswith(":str")]
        for name in {n for n in names if names.count(n) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"{name!r} appears twice", node.start_mark
            )
        return dict(super().construct_mapping(node, deep))


def damaged(path: Path, why: object, fix: str = RESTORE) -> ValueError:
    """Return the error for a file with the wrong contents. One of ours is whole or absent, so a
    disk or a person did this; without the file a run resumes or starts over."""
    if fix == RESTORE and path.name == CONFIG:
        fix = RESTORE_CONFIG
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
    """Return whether the disk or its quota was full, or a file at its limit (ulimit -f)."""
    return isinstance(error, OSError) and error.errno in FULL


def package(name: str, setting: str) -> Any:
    """Import a package of the extra `hf`; ValueError when `setting` needs it and it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        missing = f"the package {error.name or name}: pip install 'zpp_lab[hf]'"
        raise ValueError(f"{setting} needs {missing}") from None


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Lay out a table for a terminal; the first `left` columns are text, the others numbers. One
    that would be wider than _WIDTH has heads and text in several lines."""
    widths = _widths(columns, rows, left)
    parts = [columns, ["─" * width for width in widths], *rows]
    lines = [line for row in parts for line in _lines(row, widths)]
    return "\n".join("  ".join(_align(line, widths, left)).rstrip() for line in lines)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[int]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    room = _WIDTH - 2 * (len(widths) - 1)
    if sum(widths) > room:
        heads = [_longest([head]) for head in columns]
        bodies = [max(map(len, cells), default=0) for cells in zip(*rows, strict=True)]
        widths = list(map(max, heads, bodies or heads))
    whole = [_longest(cells) for cells in zip(columns, *rows, strict=True)]
    for least in (whole, [_NARROW] * left):  # words break only where lines alone do not do
        while sum(widths) > room and (own := [i for i in range(left) if widths[i] > least[i]]):
            widths[max(own, key=lambda i: widths[i])] -= 1
    return widths


def _longest(cells: Sequence[str]) -> int:
    """Return the length of the longest part between spaces."""
    return max((len(part) for cell in cells for part in cell.split()), default=0)


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[list[str]]:
    pairs = zip(row, widths, strict=True)
    parts = [[cell] if len(cell) <= width else wrap(cell, width) for cell, width in pairs]
    return map(list, zip_longest(*parts, fillvalue=""))


def percents(values: Sequence[float]) -> str:
    """Format the values that differ, rounded down: 100% is all there is."""
    shown = [f"{int(1000 * value + 1e-9) / 10:g}" for value in values]
    return "/".join(dict.fromkeys(shown)) + "%" if shown else "–"


def amount(count: float) -> str:
    """Format bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.5 or unit == "EB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _align(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _folder(name: str) -> Path:
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name}/ is missing next to and inside {_PACKAGE}: reinstall zpp_lab")


def conf_dir() -> Path:
    return _folder("conf")


def conf_dirs() -> list[Path]:
    """Return conf/, and the user's own folder: the one that --config-dir names, else conf/ of the
    working folder where that has recipes or studies. conf/ takes precedence."""
    own = os.environ.get(OWN_CONF)
    if own:
        return [conf_dir(), Path(own)]
    here = Path("conf").resolve()
    used = here != conf_dir().resolve() and any((here / group).is_dir() for group in BEGIN_WITH)
    return [conf_dir(), *([here] if used else [])]


def conf_names(group: str) -> list[str]:
    """Return the names that a group of conf/ has, the user's own among them."""
    return sorted({path.stem for one in conf_dirs() for path in (one / group).glob("*.yaml")})


def listed_names(group: str, names: Sequence[str]) -> str:
    """Join `names`, after the ones to begin with where the list is long."""
    first = [name for name in BEGIN_WITH.get(group, ()) if name in names]
    every = ", ".join(names)
    return f"{', '.join(first)} to begin with; all: {every}" if first else every


def cuda_dir() -> Path:
    return _folder("cuda")


def looks_like_folder(text: str) -> bool:
    """Return whether `text` is a path here, not a name on the Hugging Face Hub ([OWNER/]NAME)."""
    begins = text in (".", "..") or text.startswith(("/", "./", "../", "~"))
    if begins or text.endswith("/") or text.count("/") > 1:
        return True
    path = Path(text)
    return path.exists() or ("/" in text and path.parent.is_dir())


def nearest(path: Path) -> Path | None:
    """Return the existing path whose name is most like that of the missing part of `path`."""
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
    """List a folder; nothing of one that this user may not read."""
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []


def missing(path: Path, what: str = "folder") -> str:
    """Describe a path that does not exist, with what may have been meant."""
    if path.is_file() and what == "folder":
        return "a file, not a folder"
    near = nearest(path)
    if near is not None and near != path:
        return f"{what} not found (did you mean {near}?)"
    there = next((p for p in path.parents if p.is_dir()), None)
    if there is None or there == Path():
        return f"{what} not found in {Path.cwd()}" if not path.is_absolute() else f"no such {what}"
    names = [name for name in _names(there) if not name.startswith(".")]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} not found; in {there}: {', '.join(names[:_SHOWN]) or 'nothing'}{more}"


def check_name(name: str) -> None:
    """ValueError when the name of a study, arm, run or recipe cannot be a folder's."""
    if not _FOLDER_NAME.fullmatch(name):
        raise ValueError(
            "its name becomes a folder's name; use letters, digits and _ . , + = -, no dot first"
        )


def below(folder: Path, mark: str) -> str:
    """Ask about the folders just below that hold `mark`; "" where there are none."""
    if not folder.is_dir():
        return ""
    found = sorted(str(p.parent) for p in folder.glob(f"*/{mark}"))[:_SHOWN]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def hold(folder: Path) -> IO[str]:
    """Lock `folder` until the returned file is closed, waiting for another process."""
    file = open(folder / LOCK, "w")  # noqa: SIM115
    if not _taken_within(file, _GLANCE):
        note = f"{folder}: another process is working here; this one starts when it has ended"
        print(note, file=sys.stderr, flush=True)
        _taken(file, fcntl.LOCK_EX)
    return file


@contextmanager
def _alone(folder: Path, otherwise: str, patience: float = 0.0) -> Iterator[None]:
    """Hold `folder`, created where it is missing. A mistake that ends the body removes it again if
    it holds nothing else. ValueError, `otherwise`, when another process keeps it."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as file:
        if not _taken_within(file, max(patience, _GLANCE)):
            raise ValueError(f"{folder}: {otherwise}")
        try:
            yield
        except (ValueError, OSError):
            with contextlib.suppress(OSError):  # the mistake itself is what must be seen
                _unmake(new)
            raise


def _unmake(new: list[Path]) -> None:
    """Remove a folder, and those above that came with it, which hold nothing but it."""
    names = {path.name for path in new[0].iterdir()} if new else set()
    if names <= {LOCK, FAILURE}:
        for name in names:
            (new[0] / name).unlink()
        for path in new:
            path.rmdir()


def _taken_within(file: IO[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not _taken(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def _taken(file: IO[str], how: int, quiet: bool = False) -> bool:
    """Return whether this process has the lock now, or there are none, which it prints."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, file.name) from error
        if not quiet:
            print(
                f"{file.name}: no locks on this file system ({error.strerror}): a second start in "
                "this folder cannot be prevented, and reports cannot show that this one is running",
                file=sys.stderr,
            )
    return True


def at_work(folder: Path, patience: float = 0.0, more: str = "") -> AbstractContextManager[None]:
    """Hold a run's folder, created if missing, and removed if a mistake (ValueError, OSError)
    came before the run. ValueError, which ends with `more`, when it is taken after `patience`
    seconds."""
    otherwise = "a run is active here already; wait for it or stop it, or set another run.dir"
    return _alone(folder, otherwise + more, patience)


def only_one(root: Path) -> AbstractContextManager[None]:
    """Hold a study's folder, so that no run starts twice; created and removed as in `at_work`."""
    otherwise = "a study is running here already; watch it with --watch, wait for it or stop it"
    return _alone(root, otherwise)


def held(folder: Path) -> bool:
    """Return whether a living process holds `folder`; False where the file system has no locks."""
    try:
        file = open(folder / LOCK)  # noqa: SIM115
    except FileNotFoundError:
        return False
    with file:
        return not _taken(file, fcntl.LOCK_SH | fcntl.LOCK_NB, quiet=True)


def asked_offline() -> bool:
    """Return whether the user wants no network: the libraries then use their cache."""
    return any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in _OFFLINE)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or _ENDPOINT


def reachable(seconds: float = SECONDS) -> bool:
    """Return whether the Hub, or the proxy in front of it, answers within `seconds`."""
    if asked_offline():
        return False
    answers: list[bool] = []
    place = _place(endpoint())
    # a name server that is silent cannot be given a limit, but it can be left alone
    asker = threading.Thread(target=lambda: answers.append(_opens(*place, seconds)), daemon=True)
    asker.start()
    asker.join(seconds)
    return bool(answers) and answers[0]


def why_not() -> str:
    if asked_offline():
        return f"{next(n for n in _OFFLINE if os.environ.get(n))} is set"
    return f"{endpoint()} does not answer in {SECONDS:g} s (HF_HUB_OFFLINE=1 reads only the cache)"


def _place(url: str) -> tuple[str, int]:
    """Return host and port of the first connection."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme) or getproxies().get("all")
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    ports = {"http": 80, "https": 443}
    return target.hostname or "", target.port or ports.get(target.scheme, 1080)


def _opens(host: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True
