"""Network namespaces: the kernel calls that Python 3.11 lacks, and two processes.

`python -m zpp_lab.tools.links.namespaces hold` keeps a namespace alive. When its standard input
ends, so has the owner, and everything that carries its mark is killed. `... enter PARENT PID
COMMAND...` runs COMMAND in the namespace of PID (0: the one that is here), and dies with PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from zpp_lab.train.launch import processes

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_PR_SET_PDEATHSIG = 1
READY = "ready"  # what a holder says
NOT_FOUND = 127
T = TypeVar("T")


def new_network() -> None:
    """Move this thread into a network namespace of its own. OSError when the kernel refuses."""
    _call("unshare", CLONE_NEWNET)


def mount_sysfs() -> None:
    """Under /sys this thread sees the devices of its network namespace, with mounts of its own
    that go with it: for `inside`.

    OSError when the kernel, or what guards a container, refuses.
    """
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)
    _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)


def enter_network(pid: int) -> None:
    """Move this thread into the network namespace of a process. OSError when it cannot."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _call("setns", descriptor, CLONE_NEWNET)
    finally:
        os.close(descriptor)


def inside(pid: int, work: Callable[[], T]) -> T:
    """Call `work()` in a process's network namespace. Sockets that it makes stay there for good."""
    results: list[T] = []
    errors: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            enter_network(pid)  # moves this thread alone
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter_and_work, name="inside a namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _call(name: str, *arguments: int | bytes | ctypes.c_ulong | None) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def hold() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the owner decides
        signal.signal(number, signal.SIG_IGN)
    owner = os.environ[processes.VARIABLE]
    try:
        new_network()
    except OSError as error:
        print(error.strerror, flush=True)
        return
    print(READY, flush=True)
    sys.stdin.buffer.read()
    processes.end(lambda other: other == owner)


def enter(parent: str, pid: str, *command: str) -> None:
    die_with_parent(int(parent))
    if int(pid):
        enter_network(int(pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    _, what, *words = sys.argv
    hold() if what == "hold" else enter(*words)
