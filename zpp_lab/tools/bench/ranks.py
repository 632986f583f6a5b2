"""A bench of several ranks on this host: how they start, and where each works."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zpp_lab.train.launch.place import die_with_parent


def start(module: str, argv: Sequence[str], ranks: int) -> None:
    """Run `python -m module argv` as so many ranks; returns when they have ended."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        1,
        1,
        ranks,
        run_id=uuid.uuid4().hex,  # without one torch warns
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    elastic_launch(settings, sys.executable)("-m", module, *argv)


def join(on_gpu: bool) -> torch.device:
    """Joins the ranks; this one's device."""
    die_with_parent()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return device
