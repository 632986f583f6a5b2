"""Ranks on the CPU that the machine cannot hold are refused before they start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from zpp_lab.config.compose import compose
from zpp_lab.runs.metrics import from_json
from zpp_lab.train.launch import launcher
from zpp_lab.train.memory import host
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.host import check_host_memory


@dataclass
class Failure:
    """What torch's launcher says of a rank that was killed."""

    exitcode: int = -9
    timestamp: int = 0
    message: object = "Signal 9 (SIGKILL) received by PID 4"

    def signal_name(self) -> str:
        return "SIGKILL"


@dataclass
class Failed:
    failures: dict[int, Failure]


def test_what_cannot_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 32 * GIB)
    wide = ["engine=fsdp", "engine.device=cpu", "cluster=1x8"]
    check_host_memory(compose([*wide, "model=125m"]))
    with pytest.raises(ValueError, match=r"8 ranks .*\d\.\d GiB .*32\.0 GiB"):
        check_host_memory(compose([*wide, "model=1_3b"]))


@pytest.mark.parametrize("engine", ["fsdp", "virtual"])
def test_what_encoders_remember_is_counted_with_what_to_do(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 × 4 ranks that each remember 125M elements and, between nodes, a quarter of these."""
    monkeypatch.setattr(host, "memory_bytes", lambda: 8 * GIB)
    words = [f"engine={engine}", "engine.device=cpu", "cluster=2x4", "model=125m", "recipe=g2_ef"]
    words += ["recipe.grads.memory.store=fp32", "data.seq_len=64", "train.batch_size=1"]
    held = {"fsdp": r"1\.2", "virtual": r"10\.0"}[engine]  # of each rank, or of all
    told = rf"Of these, {held} GiB .*between nodes "
    with pytest.raises(ValueError, match=told):
        check_host_memory(compose(words))
    if engine == "virtual":
        check_host_memory(compose([*words, "recipe.grads_intra.memory.kind=none"]))


@pytest.mark.parametrize("full", [True, False])
def test_a_rank_that_was_killed_for_memory_says_so(tmp_path: Path, full: bool) -> None:
    with pytest.raises(launcher.RankFailed, match="SIGKILL") as told:
        launcher._report(Failed({5: Failure()}), tmp_path, full)
    assert ("memory was full" in str(told.value)) == full
    outcome = from_json((tmp_path / "failure.json").read_text())["outcome"]
    assert outcome == ("out_of_memory" if full else "crashed")
