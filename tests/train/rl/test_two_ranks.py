"""Runs of rewards on GPUs: two ranks over NCCL or peers' memory end with the virtual engine's bits.

torchrun --standalone --nproc-per-node 2 -m tests.train.rl.test_two_ranks ANSWERS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.rl.test_runs import ARMS, in_each_rank, lines, mine, same_end, small
from tests.two_ranks import COUNT, answers_of, two_ranks
from zpp_lab.api import init
from zpp_lab.config.schema import Config
from zpp_lab.train.rl import rewards
from zpp_lab.train.trainer import run

# raw, stochastic 4 bits, and node-replicated weights with differences, which need two nodes
CASES = {
    **{f"{arm}-2x1": (*ARMS[arm], "cluster=2x1", "engine.transport=groups") for arm in ARMS},
    **{f"{arm}-1x2": (*ARMS[arm], "engine.transport=peer") for arm in ("raw", "w4")},
}
SEEN = [case for case in CASES if COUNT > 1 or "2x1" in case]  # emulated nodes share one GPU


def configured(folder: Path, case: str, engine: str) -> Config:
    """Return the settings of a case; of the virtual engine without those of real ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = [s for s in CASES[case] if engine == "fsdp" or not s.startswith("engine.")]
    more = [f"engine={engine}", f"engine.device={device}"]
    more += ["engine.ordered=true"] if engine == "fsdp" else []
    return small(folder, f"{engine}-{case}", *own, *more)


def main() -> None:
    """Train every case on the ranks that were started."""
    init()
    answers = Path(sys.argv[1])
    for case in SEEN:
        in_each_rank(configured(answers.parent, case, "fsdp"))
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps([case, "trained"]) + "\n")
    dist.barrier()
    os._exit(0)  # groups that are torn down may abort


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The runs' folder, and which have ended; with the output where one has failed."""
    folder = tmp_path_factory.mktemp("rewards")
    return folder, answers_of("tests.train.rl.test_two_ranks", folder, 600)


@pytest.mark.gpu
@two_ranks
@pytest.mark.parametrize("case", SEEN)
def test_two_ranks_end_as_virtual_ones(
    case: str, trained: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, rewards, losses, norms and weights."""
    folder, ended = trained
    assert case in ended, ended["output"]
    monkeypatch.setitem(rewards._SHIPPED, "mine", mine)
    other, here = (configured(folder, case, engine) for engine in ("fsdp", "virtual"))
    run(here)
    found = lines(here)
    assert found == lines(other)
    assert same_end(here, other)
    assert found[0]["rl"]["reward"] != found[-1]["rl"]["reward"]
    assert (found[0]["rl"]["mismatch"] > 1e-4) == case.startswith("w4")


if __name__ == "__main__":
    main()
