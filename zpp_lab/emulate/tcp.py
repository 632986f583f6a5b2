"""How TCP behaves between emulated nodes, so that a link's speed is what bounds it."""

from __future__ import annotations

import os
from pathlib import Path

from zpp_lab.emulate.kernel import inside, mount_sysfs

SETTINGS = Path("/proc/sys/net/ipv4")
AVAILABLE = SETTINGS / "tcp_available_congestion_control"
SLOW_START = SETTINGS / "tcp_slow_start_after_idle"


def congestion_control() -> str:
    """Loss-based, whatever this host's default is: `cubic` where it is loaded, or `reno`, which
    every kernel has.

    BBR measures each stream's share of the link while it sends; among many streams that send in
    bursts and then wait for a step, single ones stay at a small share for 0.2 s at a time.
    """
    names = AVAILABLE.read_text().split() if AVAILABLE.exists() else []
    return "cubic" if "cubic" in names else "reno"


def keep_windows(pid: int) -> bool:
    """In the namespace of process `pid`, a stream that was idle goes on where it stopped; whether
    that holds."""
    try:
        inside(pid, lambda: SLOW_START.write_text("0"))
    except OSError:
        return False
    return True


def keep_order(pid: int, interface: str) -> bool:
    """Each stream's packets that arrive at `interface` go to one processor; whether that holds.

    pid: a process in the interface's namespace.
    A veth pair leaves them to the processor that sent them, which changes from packet to packet:
    some overtake others, and TCP takes those for lost, sends them again and slows down.
    """
    steering = Path(f"/sys/class/net/{interface}/queues/rx-0/rps_cpus")

    def steer() -> None:
        mount_sysfs()
        steering.write_text(_mask(os.cpu_count() or 1))

    try:
        inside(pid, steer)
    except OSError:
        return False
    return True


def _mask(processors: int) -> str:
    """All of them, as the kernel reads it: groups of 32 bits, the highest first."""
    digits = f"{2**processors - 1:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[start : start + 8] for start in range(0, len(digits), 8))
