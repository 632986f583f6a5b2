"""A program in place of nvidia-cuda-mps-control: a daemon that writes down what it is asked.

Beside the program lie `calls` (what it was told, a line each), `seen` (variables of the daemon),
`clients` (what it answers) and, where they are, `refuses` (it fails, and says that), `no_server`,
`stubborn` (its server does not heed `quit`) and `busy` (it refuses a question for each line).
"""

from __future__ import annotations

from pathlib import Path

from zpp_lab.train.launch.mps import CONTROL

SCRIPT = """#!/bin/bash
place=$(dirname "$0")
if [ "$1" = -d ]; then
  echo daemon >> "$place/calls"
  if [ -f "$place/refuses" ]; then cat "$place/refuses"; exit 1; fi
  echo "$CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" > "$place/seen"
  echo "${CUDA_VISIBLE_DEVICES-unset}" >> "$place/seen"
  sleep 600 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/pid"  # the daemon
  sleep 600 & echo $! >> "$place/server"
  exit 0
fi
read -r command
echo "$command" >> "$place/calls"
if [ "$command" != quit ] && [ -s "$place/busy" ]; then
  sed -i 1d "$place/busy"
  echo "not now" >&2
  exit 1
fi
case $command in
  get_server_list) [ -f "$place/no_server" ] || tail -n 1 "$place/server" ;;
  get_client_list*) cat "$place/clients" ;;
  quit)
    kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")"
    [ -f "$place/stubborn" ] || kill "$(tail -n 1 "$place/server")" ;;
esac
exit 0
"""


def fake_mps(folder: Path) -> Path:
    """The program in `folder`, to be put on PATH; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / CONTROL
    program.write_text(SCRIPT)
    program.chmod(0o755)
    (folder / "clients").write_text("")
    return program


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()
