"""One rank of `zpp-lab bench step`: does what its parent asks, line by line, and answers.

Commands come as JSON lines on standard input, answers go to the descriptor that the parent names.
All ranks get the same commands in the same order, so their collectives meet.

    {"do": "facts"}                        what this rank runs on
    {"do": "build", "arm": 0}              make the arm's engine and take one step
    {"do": "steps", "arm": 0, "steps": 3}  seconds of each step, which begins before the one before
                                           it is awaited, those of them in which the host waited
                                           for the device, the last's bytes, peak memory, whether
                                           all came from a CUDA graph
    {"do": "drain"}                        wait for what all streams still compute and send
    {"do": "drop", "arm": 0}               give the engine's memory back
    {"do": "end"}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.utils import deterministic

from zpp_lab.codecs import kernels
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch
from zpp_lab.engines.build import pick_device
from zpp_lab.engines.fsdp.graph import WARM_UP
from zpp_lab.tools.bench.step.engines import MAKERS, Timed, vocabulary
from zpp_lab.train.footprint import settle
from zpp_lab.train.launch.launcher import connect

Answer = dict[str, Any]


class Rank:
    """Engines of this rank by arm, and their memory."""

    def __init__(self, arms: list[tuple[str, Config]]) -> None:
        self.arms = arms
        first = arms[0][1]
        _enough_gpus(first)
        self.rank = connect(first)
        self.device = pick_device(first.engine)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            # for all arms: a CUDA graph cannot be captured on the default stream
            torch.cuda.set_stream(torch.cuda.Stream())
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.made: dict[int, Timed] = {}
        self.numbers: dict[int, int] = {}
        self.resident: dict[int, int] = {}  # bytes that an arm holds between its steps
        self.captured: dict[int, int] = {}  # at most in its first ones: replays allocate nothing

    def facts(self, _: Answer) -> Answer:
        found = {"torch": torch.__version__, "device": str(self.device)}
        if self.device.type == "cuda":
            found["device"] = torch.cuda.get_device_name(self.device)
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return found

    def build(self, command: Answer) -> Answer:
        maker, config = self.arms[command["arm"]]
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        torch.use_deterministic_algorithms(config.engine.deterministic)
        kernels.configure(config.ops.backend)
        before = self._allocated()
        self.made[command["arm"]] = MAKERS[maker](config, self.device)
        self.numbers[command["arm"]] = 0
        self._step(command["arm"])  # the optimizer's state comes with the first step
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            for _ in range(WARM_UP + 1):  # and a CUDA graph with the last of these
                self._step(command["arm"])
            self.captured[command["arm"]] = torch.cuda.max_memory_allocated(self.device) - before
        self.resident[command["arm"]] = self._allocated() - before
        settle()
        return {}

    def drop(self, command: Answer) -> Answer:
        del self.made[command["arm"]]
        gc.unfreeze()  # else cycles in it would stay
        settle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def drain(self, command: Answer) -> Answer:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {}

    def steps(self, command: Answer) -> Answer:
        arm, before = command["arm"], self._allocated()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        replays = self.made[arm].replays
        dist.barrier()
        seconds, waiting, sent = [], [], None
        for left in reversed(range(command["steps"])):
            began = time.perf_counter()
            sent = self._step(arm, goes_on=left > 0)
            seconds.append(time.perf_counter() - began)
            waiting.append(self.made[arm].waiting)
        peak = None
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before + self.resident[arm]
            peak = max(peak, self.captured[arm])
        wires = {wire: list(traffic) for wire, traffic in sent.items()} if sent else None
        replayed = self.made[arm].replays - replays == command["steps"]
        found = {"seconds": seconds, "waiting": waiting, "bytes": wires, "peak": peak}
        return {**found, "replayed": replayed}

    def _step(self, arm: int, goes_on: bool = False) -> Any:
        config, number = self.arms[arm][1], self.numbers[arm]
        self.numbers[arm] += 1
        batches = partial(random_batch, config)
        ahead = partial(batches, number + 1) if goes_on else None
        sent = self.made[arm].step(number, partial(batches, number), ahead)
        # not other streams: new weights travel during the next step
        if not goes_on and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return sent

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def random_batch(config: Config, step: int, rank: int, micro: int) -> Batch:
    """Return inputs and targets, int64 [batch_size, seq_len], of random tokens."""
    shape = config.train.batch_size, config.data.seq_len + 1
    generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + micro)
    tokens = torch.randint(0, vocabulary(config), shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _enough_gpus(config: Config) -> None:
    wanted, found = config.cluster.gpus_per_node, torch.cuda.device_count()
    if config.engine.device != "cpu" and torch.cuda.is_available() and found < wanted:
        raise ValueError(
            f"{wanted} GPUs a node of {config.cluster.nodes} are needed, but a node would have "
            f"{found}: use fewer nodes or --gpus-per-node, or --cpu"
        )


def main(settings: str, answers: str) -> None:
    """Serve one rank. settings: YAML of the arms' makers and configs; answers: a descriptor."""
    found = os.fdopen(int(answers), "w", buffering=1)

    def answer(value: Answer) -> None:
        found.write(json.dumps(value) + "\n")

    try:
        arms = yaml.safe_load(Path(settings).read_text())
        rank = Rank([(arm["maker"], load(Config, arm["config"])) for arm in arms])
        answer({})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "end":
                break
            answer(getattr(rank, command["do"])(command))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)  # groups that are torn down may abort


if __name__ == "__main__":
    main(*sys.argv[1:])
