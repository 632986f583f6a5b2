"""Ranks over NCCL for GPU tests: one for each GPU, or two emulated nodes that share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.links.shared import refusal

COUNT = torch.cuda.device_count()
WHY_NOT = "" if COUNT > 1 else refusal() if COUNT else "needs a GPU"
two_ranks = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
two_gpus = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(COUNT < 4, reason="needs four GPUs")


def starting(*module: str, ranks: int = 2) -> list[str]:
    """A command that starts ranks of a module with its arguments."""
    if COUNT != 1 or ranks == 1:
        start = f"-m torch.distributed.run --standalone --nproc-per-node={ranks}"
        return [sys.executable, *start.split(), "-m", *module]
    nodes = "emulate --nodes 2 --gpus-per-node 1 --link-gbps max --share-gpus=time-slices --"
    return [sys.executable, "-m", "zpp_lab.cli", *nodes.split(), sys.executable, "-m", *module]


def environment() -> dict[str, str]:
    """Its environment: without NVLink's multicast, and deterministic."""
    quiet = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    return {**os.environ, **quiet, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}


def answers_of(module: str, folder: Path, seconds: float, ranks: int = 2) -> dict[str, Any]:
    """Answers of one start of a module, which writes each to the file of its argument as a line of
    JSON, [name, answer]; as `output` what it printed, where it has failed."""
    answers, log = folder / "answers", folder / "answers.log"
    with log.open("wb") as file:
        done = subprocess.run(
            starting(module, str(answers), ranks=ranks),
            cwd=Path(__file__).parents[1],
            env=environment(),
            stdout=file,
            stderr=file,
            timeout=seconds,
            check=False,
        )
    lines = answers.read_text().splitlines() if answers.exists() else []
    text = log.read_text(errors="replace") if done.returncode else ""
    return {"output": text[-6000:], **dict(json.loads(line) for line in lines)}
