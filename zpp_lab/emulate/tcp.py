"""How TCP behaves between emulated nodes, so that a link's speed is what bounds it."""

from __future__ import annotations

from pathlib import Path

from zpp_lab.emulate.kernel import inside

SETTINGS = Path("/proc/sys/net/ipv4")
AVAILABLE = SETTINGS / "tcp_available_congestion_control"
SLOW_START = SETTINGS / "tcp_slow_start_after_idle"


def congestion_control() -> str:
    """Loss-based, whatever this host's default is: `cubic`, or `reno`, which every kernel has.

    BBR measures each stream's share of the link while it sends; among many streams that send in
    bursts and then wait for a step, single ones stay at a small share for 0.2 s at a time.
    """
    names = AVAILABLE.read_text().split() if AVAILABLE.exists() else []
    return "cubic" if "cubic" in names else "reno"


def keep_windows(pid: int) -> None:
    """In the namespace of process `pid`, a stream that was idle goes on where it stopped."""
    inside(pid, lambda: SLOW_START.write_text("0"))
