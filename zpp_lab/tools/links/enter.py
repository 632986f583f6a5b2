"""`python -m zpp_lab.tools.links.enter PARENT PID COMMAND...`: COMMAND in the namespace of PID.

It takes this process's place, and dies with PARENT. PID 0 stays in the namespace that is here.
"""

from __future__ import annotations

import os
import sys

from zpp_lab.tools.links.kernel import die_with_parent, enter_network

NOT_FOUND = 127


def main(words: list[str]) -> None:
    parent, pid, *command = words
    die_with_parent(int(parent))
    if int(pid):
        enter_network(int(pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
