"""An owner of two emulated nodes that waits to be ended; it runs a process with a child of its own.

python job.py FOLDER    writes FOLDER/pids, when all is there
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from zpp_lab.tools.links.network import Tools
from zpp_lab.tools.links.nodes import EmulatedNodes


def main(folder: Path) -> None:
    with EmulatedNodes(2, Tools.find()) as nodes:
        started = nodes.start(1, ["sh", "-c", "sleep 600 & sleep 600"], {})
        while not (children := child_pids(started.pid)):
            time.sleep(0.02)
        pids = [*nodes.places.values(), started.pid, *children]
        (folder / "pids.tmp").write_text(" ".join(map(str, pids)))
        (folder / "pids.tmp").rename(folder / "pids")
        time.sleep(600)


def child_pids(pid: int) -> list[int]:
    said = subprocess.run(
        ["cat", f"/proc/{pid}/task/{pid}/children"], capture_output=True, check=False
    )
    return [int(word) for word in said.stdout.split()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
