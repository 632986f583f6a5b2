"""Facts about this machine and this code, kept with every result, without host or user names.

A stopped run may resume with other code, so `note_commit` records which commit made which steps.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from zpp_lab.files import damaged, parse_json, write_atomic

FILE = "commits.json"
PACKAGE = Path(__file__).resolve().parents[1]
COMMIT = "ZPP_COMMIT"  # the commit of a copy that has no .git, set by who made it
_BUILT = "commit.txt"  # the commit of a wheel, in the package; hatch_build.py writes it


def note_commit(folder: Path, step: int, commit: str | None) -> list[dict[str, Any]]:
    """Keep, next to the run, that the steps after `step` are made at `commit`.

    Returns all of them, oldest first: {"after": step, "commit": commit}. A commit of None is not
    known: the package lies in no checkout, or an older version began the run.
    """
    path, made = folder / FILE, []
    if step > 0:
        made = [one for one in _read(path) or [_from(0, None)] if one["after"] < step]
    if not made or made[-1]["commit"] != commit:
        made.append(_from(step, commit))
    write_atomic(path, json.dumps(made, indent=1) + "\n")
    return made


def _read(path: Path) -> list[dict[str, Any]]:
    """What it says, [] where there is no file; ValueError that names a damaged one."""
    try:
        made = parse_json(path)
    except FileNotFoundError:
        return []
    if not isinstance(made, list) or not all(isinstance(one, dict) for one in made):
        raise damaged(path, "expected a list of steps and commits")
    return made


def _from(step: int, commit: str | None) -> dict[str, Any]:
    return {"after": step, "commit": commit}


def machine_facts() -> dict[str, Any]:
    """Return CPU model, usable cores, memory in bytes, GPU names and operating system."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Return versions of Python, torch and zpp_lab; None for what is not installed as a package."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "zpp_lab"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Count the cores that this process may use: its affinity, and the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = min(allowed, max(1, -(-int(quota) // int(period))))
    return allowed


def memory_bytes() -> int:
    """Return memory of the machine, or of the container when that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def gpu_memory() -> int | None:
    """Return the smallest GPU's memory in bytes, from the driver's tool; None if unknown."""
    text = output(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    sizes = [int(line) for line in (text or "").split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes else None


def oom_kills() -> int:
    """Count this container's processes that the kernel killed for lack of memory so far."""
    lines = dict(line.split() for line in _cgroup("memory.events").splitlines())
    return int(lines.get("oom_kill", 0))


def _cgroup(name: str) -> str:
    """A limit of this process's control group (version 2), empty when there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def gpus() -> list[str]:
    """Return the GPUs' names: from torch when it is loaded, else from the driver's tool."""
    torch = sys.modules.get("torch")
    if torch is not None:
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_name(index) for index in range(count)]
    if shutil.which("nvidia-smi") is None:
        return []
    out = output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return [line.strip() for line in (out or "").splitlines() if line.strip()]


@functools.cache
def commit(package: Path = PACKAGE) -> str | None:
    """Return the git commit that the package is checked out from, with "-dirty" when it was
    changed.

    Of a package that no checkout has (a copy without its .git, an installed one, even inside
    another project's checkout) what ZPP_COMMIT says, else what its wheel was built at, else None.
    ValueError when ZPP_COMMIT is no commit. The first answer is kept: it is that of the code which
    runs.
    """
    # A container may show the checkout as another user's, of which git would not speak; what it
    # then might run for that user is nothing compared with importing the package.
    git = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", str(package)]
    if output([*git, "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return _stated_commit(package / _BUILT)
    head = output([*git, "rev-parse", "HEAD"])
    if head is None:
        return None
    changed = output([*git, "status", "--porcelain", "--untracked-files=no"])
    added = output([*git, "status", "--porcelain", "--", "."])
    return head.strip() + ("-dirty" if changed or added else "")


def check_commit() -> None:
    """Raise ValueError when ZPP_COMMIT is not a commit; asks git only if it is set."""
    if COMMIT in os.environ:
        commit()


def version_text() -> str:
    """Return version, commit and torch's version, as `zpp-lab --version` prints them."""
    found, at = versions(), commit()
    own = (found["zpp_lab"] or "(not installed)") + (f", commit {at}" if at else "")
    return f"zpp_lab {own}, torch {found['torch'] or '(not installed)'}"


def _stated_commit(built: Path) -> str | None:
    found = os.environ.get(COMMIT)
    if found is None and built.is_file():
        return built.read_text().strip()
    if found is not None and not re.fullmatch("[0-9a-f]{40}(-dirty)?", found):
        raise ValueError(
            f"{COMMIT}={found!r} is not a commit: use the 40 digits that `git rev-parse HEAD` "
            "prints in the original checkout, followed by -dirty if it was changed, or unset "
            f"{COMMIT}"
        )
    return found


def output(command: list[str]) -> str | None:
    """Return what a command prints, None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
