"""Runs that `python -m tests.golden --against FILE` records: every recipe of `fsdp_parity.CASES` in
one process, seventeen of them with a process for each rank, and user training loops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import fsdp_parity as parity
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch, build_uneven
from zpp_lab.api import shard
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import ClusterConfig

STEPS = 3
GRID = (2, 2)  # nodes, GPUs per node
CASES = tuple(parity.CASES)
RANKS = (  # each kind of state that outlives a step, on real processes
    *("kept", "kept_other_bits", "kept_drawn", "differences", "differences_fp32"),
    *("differences_drawn", "differences_whole", "memory_fp32", "memory_loco"),
    *("memory_hadamard_mixed", "phases_memory", "phases_differences", "phases_hops"),
    *("host_states", "grid_none_none_node", "grid_memory", "split_differences"),
)
RESIDUAL = {"hops": 2, "grads": {**parity.S4, **parity.residual(store="8bit")}}
LOOPS: dict[str, dict[str, Any]] = {
    "raw": {},
    "memories": RESIDUAL,
    "phases": RESIDUAL | {"weights": parity.Q8, "phases": [parity.after(2, weights=parity.Q4)]},
    "kept": {**parity.KEPT, "weights": parity.Q8, "weights_update": parity.Q4, "grads": parity.Q4},
    "differences": parity.CASES["differences_drawn"][0] | {"grads": RESIDUAL["grads"]},
}


def digest(parts: Iterable[Tensor | np.ndarray | bytes | str]) -> str:
    """64 bits over bytes, shapes and dtypes; every NaN is the same NaN."""
    taken = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            taken.update(f"{part.dtype} {tuple(part.shape)}".encode())
            if part.is_floating_point():
                part = torch.where(part.isnan(), torch.full_like(part, torch.nan), part)
            part = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(part, np.ndarray):
            taken.update(f"{part.dtype} {part.shape}".encode())
        taken.update(part.encode() if isinstance(part, str) else bytes(part))
    return taken.hexdigest()[:16]


def summed(outcome: parity.Outcome) -> dict[str, Any]:
    """What `fsdp_parity` compares, in few words."""
    done, heldout, state = outcome
    losses, norms, sent, telemetry = zip(*done, strict=True)
    return {
        "losses": losses,
        "norms": norms,
        "heldout": heldout,
        "bytes": digest(str([(w, *t) for w, t in sorted(each.items())]) for each in sent),
        "telemetry": digest(json.dumps(each, sort_keys=True) for each in telemetry),
        "state": digest(part for name in sorted(state) for part in (name, state[name])),
    }


def virtual_cases(folder: Path, cases: Collection[str] = CASES) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    configs = {case: parity.configured(case, *GRID) for case in cases}
    return {case: summed(parity.run_virtual(c, STEPS)) for case, c in configs.items()}


def _real_cases(cases: list[str]) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    transport = ProcessGroups(ClusterConfig(*GRID), Watchdog(100.0))
    configs = {case: parity.configured(case, *GRID) for case in cases}
    return {case: summed(parity.run_real(c, STEPS, transport)) for case, c in configs.items()}


def _loops(cases: list[str]) -> dict[str, Any]:
    """Two micro-steps a step with an evaluation between them; to be called on every rank."""
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    for case in cases:
        model, losses, norms = build_uneven(), [], []
        cluster, dtype = ClusterConfig(*GRID), "bf16"
        sharded = shard(model, LOOPS[case], cluster, param_dtype=dtype, ordered=True, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS + 1):
            for micro in range(2):
                losses.append(model(*batch(step, dist.get_rank(), micro)))
                (losses[-1] / 2).backward()
                with torch.no_grad():
                    losses.append(model(*batch(999, dist.get_rank(), micro)))
            norms.append(float(sharded.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
        own = sharded.state_dict()
        own.pop("marks", None)  # of the weights, which the digest has
        state = {"weights": dict(model.named_parameters()), **own, "step": {}}
        names = {id(p): name for name, p in model.named_parameters()}
        state |= {f"moments of {names[id(p)]}": m for p, m in optimizer.state.items()}
        flat = {f"{kind} {n}": t for kind, named in state.items() for n, t in named.items()}
        tensors = parity.gathered(flat)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [loss.item() for loss in losses])
        found[case] = {
            "losses": every,
            "norms": norms,
            "step": own["step"],
            "bytes": None if "sharding" in LOOPS[case] else sorted(sharded.bytes.items()),
            "state": digest(part for name in sorted(tensors) for part in (name, tensors[name])),
        }
    return found


def real_cases(folder: Path, cases: Collection[str] = RANKS) -> dict[str, Any]:
    found: dict[str, Any] = run_world(4, _real_cases, list(cases))
    return found


def loops(folder: Path, cases: Collection[str] = tuple(LOOPS)) -> dict[str, Any]:
    found: dict[str, Any] = run_world(4, _loops, list(cases))
    return found
