"""Two ranks over NCCL for GPU tests: on two GPUs, or as two emulated nodes that share one."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.tools.links.shared import refusal

COUNT = torch.cuda.device_count()
WHY_NOT = "" if COUNT > 1 else refusal() if COUNT else "needs a GPU"
two_ranks = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
two_gpus = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")


def starting(*module: str) -> list[str]:
    """A command that starts two ranks of a module with its arguments."""
    if COUNT > 1:
        start = "-m torch.distributed.run --standalone --nproc-per-node=2"
        return [sys.executable, *start.split(), "-m", *module]
    nodes = "emulate --nodes 2 --gpus-per-node 1 --link-gbps max --share-gpus=time-slices --"
    return [sys.executable, "-m", "zpp_lab.cli", *nodes.split(), sys.executable, "-m", *module]


def environment() -> dict[str, str]:
    """Its environment: without NVLink's multicast, and deterministic."""
    quiet = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    return {**os.environ, **quiet, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
