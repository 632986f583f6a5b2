"""What the tests of emulated nodes need: the right to make some, or a reason why not."""

from __future__ import annotations

import functools
import subprocess
import sys

from zpp_lab.tools.links.namespaces import READY
from zpp_lab.tools.links.network import Tools
from zpp_lab.train.launch import processes


@functools.cache
def refusal() -> str:
    """Why this machine cannot make emulated nodes; empty when it can."""
    try:
        Tools.find()
    except processes.EmulationError as error:
        return str(error)
    tried = subprocess.run(
        [sys.executable, "-m", "zpp_lab.tools.links.namespaces", "hold"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
            processes.VARIABLE: processes.mark(),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = tried.stdout.strip()
    return "" if said == READY else f"emulated nodes need root: {said or tried.stderr[-200:]}"
