"""Where `ip` and `tc` are, and what it means when they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.tools.links.network import NET, Command
from zpp_lab.train.launch.processes import EmulationError

FOLDER = "ZPP_LAB_IPROUTE"
ENTER = [sys.executable, "-m", "zpp_lab.tools.links.namespaces", "enter"]
PLACES = ("bin", "sbin", "usr/bin", "usr/sbin")
INSTALL = (
    "install iproute2 (apt install iproute2), or unpack it into a folder with bin/ and lib/ (as "
    f"experiments/speed/iproute.sh does) and name that in {FOLDER} or --iproute"
)


@dataclass(frozen=True)
class Tools:
    """Paths of `ip` and `tc`, and the folders of libraries that came along with them."""

    ip: str
    tc: str
    libraries: tuple[str, ...] = ()

    @classmethod
    def find(cls, folder: str | Path | None = None) -> Tools:
        """In `folder`, or in the one that the environment names, or on the path.

        EmulationError when one is missing: says what to install.
        """
        if not sys.platform.startswith("linux"):
            raise EmulationError("emulated nodes need Linux: network namespaces are part of it")
        given = folder or os.environ.get(FOLDER)
        if given and not Path(given).is_dir():
            raise EmulationError(f"{given}: no such folder; {INSTALL}")
        path = (
            os.pathsep.join(str(Path(given, place).absolute()) for place in PLACES)
            if given
            else None
        )
        if path is None:
            path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        found = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
        missing = [name for name, where in found.items() if where is None]
        if missing:
            where = f" in {given}" if given else ""
            raise EmulationError(f"no {' and no '.join(missing)}{where}: {INSTALL}")
        return cls(str(found["ip"]), str(found["tc"]), _libraries(given) if given else ())

    def run(self, command: Command, pid: int) -> str:
        """What the command prints in the network namespace of process `pid`.

        EmulationError says what the kernel would need.
        """
        tool = {"ip": self.ip, "tc": self.tc}[command.words[0]]
        words = [*ENTER, str(os.getpid()), str(pid), *self._loaded(), tool, *command.words[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            needs = NET if "not permitted" in said else command.needs
            raise EmulationError(f"`{' '.join(command.words)}` failed: {said}. It needs {needs}")
        return done.stdout

    def _loaded(self) -> list[str]:
        """Libraries for the tool alone: Python and its children keep their own."""
        return (
            ["env", f"LD_LIBRARY_PATH={os.pathsep.join(self.libraries)}"] if self.libraries else []
        )


def _libraries(folder: str | Path) -> tuple[str, ...]:
    found = {str(path.parent.absolute()) for path in Path(folder).glob("**/lib*.so*")}
    return tuple(sorted(found))
