"""Real processes for tests: one start of a world runs many cases.

Processes are forked from a server that has imported torch already, and leave without tearing
down their groups: gloo with several groups may abort there.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# What most jobs import: once in the server in place of once in every rank. Names that are not
# there, as transformers may not be, are passed over.
PRELOAD = ["torch", "torch.distributed.fsdp", "tests.engines.fsdp_parity"]
PRELOAD += ["tests.runs.test_checkpoint_ranks"]
PRELOAD += [f"transformers.models.{n}.modeling_{n}" for n in ("gpt_neox", "opt", "qwen2", "llama")]


def forks() -> Any:
    """Processes that start with most imports done; a worker has one server for all its tests."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def say_into(log: str) -> None:
    """This process's output, and that of what it starts, goes to the end of a file."""
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def run_world(world: int, job: Callable[..., Any], *args: Any, seconds: float = 1700.0) -> Any:
    """What `job(*args)` returned on rank 0 (JSON); AssertionError with every rank's traceback.

    `job` runs on each rank of a fresh gloo world.
    """
    context = forks()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, job, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, time.monotonic() + seconds)
        faults = [p.read_text() for p in sorted(Path(folder).glob("fault-*"))]
        assert not faults, "\n".join(faults)
        codes = [p.exitcode for p in ranks]
        assert codes == [0] * world, f"exit codes {codes}"
        return json.loads(Path(folder, "result").read_text())


def _wait(ranks: list[Any], deadline: float) -> None:
    """Until all have ended; when one fails, the others get a moment and are then killed."""
    while any(p.is_alive() for p in ranks):
        time.sleep(0.02)
        failed = any(p.exitcode not in (None, 0) for p in ranks)
        if failed:
            deadline = min(deadline, time.monotonic() + 5.0)
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
    for process in ranks:
        process.join()


def _rank(rank: int, world: int, folder: str, job: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    from zpp_lab.train.footprint import settled

    gc.freeze()  # what the server has imported: a collection would copy each of its pages
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=600),
        )
        with settled():  # for all runs of the job
            result = job(*args)
        if rank == 0:
            Path(folder, "result").write_text(json.dumps(result))
        dist.barrier()
    except BaseException:
        Path(folder, f"fault-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
