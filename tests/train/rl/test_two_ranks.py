"""Runs of rewards on GPUs: ranks over NCCL or peers' memory end with the virtual engine's bits.

torchrun --standalone --nproc-per-node 2 -m tests.train.rl.test_two_ranks ANSWERS (or 4)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.rl.test_runs import ARMS, in_each_rank, lines, mine, same_end, small
from tests.two_ranks import COUNT, answers_of, four_gpus, two_ranks
from zpp_lab.api import init
from zpp_lab.config.schema import Config
from zpp_lab.train.rl import rewards
from zpp_lab.train.trainer import run

# raw, stochastic 4 bits, and node-replicated weights with differences, which need two nodes
FOUR = ("train.batch_size=2",)
SHAPES = {
    "2x1": (2, "groups", (*ARMS,), ()),
    "1x2": (2, "peer", ("raw", "w4"), ()),
    "2x2": (4, "groups", (*ARMS,), FOUR),
    "1x4": (4, "peer", ("raw", "w4"), FOUR),
}
CASES = {
    f"{arm}-{shape}": (*ARMS[arm], f"cluster={shape}", f"engine.transport={transport}", *more)
    for shape, (_, transport, arms, more) in SHAPES.items()
    for arm in arms
}


def seen(ranks: int) -> list[str]:
    """The cases of so many ranks; emulated nodes share one GPU."""
    shapes = [s for s, (own, *_) in SHAPES.items() if own == ranks and (COUNT > 1 or s != "1x2")]
    return [case for case in CASES if case.partition("-")[2] in shapes]


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
    for case in seen(dist.get_world_size()):
        in_each_rank(configured(answers.parent, case, "fsdp"))
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps([case, "trained"]) + "\n")
    dist.barrier()
    os._exit(0)  # groups that are torn down may abort


Trained = Callable[[int], tuple[Path, dict[str, str]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The runs' folder, and which have ended; with the output where one has failed."""

    @cache
    def of_ranks(ranks: int) -> tuple[Path, dict[str, str]]:
        folder = tmp_path_factory.mktemp("rewards")
        return folder, answers_of("tests.train.rl.test_two_ranks", folder, 600, ranks)

    return of_ranks


ON_GPUS = [
    pytest.param(ranks, case, marks=mark)
    for ranks, mark in ((2, two_ranks), (4, four_gpus))
    for case in seen(ranks)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "case"), ON_GPUS)
def test_ranks_end_as_virtual_ones(
    ranks: int, case: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, rewards, losses, norms and weights."""
    folder, ended = trained(ranks)
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
