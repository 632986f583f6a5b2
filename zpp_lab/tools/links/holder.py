"""A process that keeps a network namespace alive, and clears up should its owner be killed.

Its standard input is a pipe whose other end the owner alone has. When that ends, so has the owner:
then everything that carries its mark is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from zpp_lab.tools.links.kernel import new_network
from zpp_lab.train.launch import processes

READY = "ready"


def main() -> None:
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


if __name__ == "__main__":
    main()
