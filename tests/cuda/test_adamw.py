"""The update kernel's arithmetic, compiled for the host, and the kernel where there is a GPU,
against the plain-torch optimizer."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zpp_lab import ops
from zpp_lab.config import TrainConfig
from zpp_lab.ops import backend
from zpp_lab.optim import adamw, update
from zpp_lab.optimizers import adamw as compact
from zpp_lab.paths import cuda_dir

CXX = shutil.which("g++") or shutil.which("clang++")
TRAIN = TrainConfig(optimizer_state="8bit", weight_decay=0.1, lr=3e-3)


def results(device: str = "cpu", ok: Tensor | None = None) -> list[Tensor]:
    """Weights, codes and scales after steps with gradients of all sizes, zeros and tiny ones."""
    made = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(5, 700, generator=made).to(device))
    optimizer = adamw({"p": p}, TRAIN, seed=4)
    for step in range(8):
        g = torch.randn(5, 700, generator=made) * torch.logspace(-18, 9, 700)
        g[1, :300] = 0
        g[2] = 0
        p.grad = g.to(device)
        update(optimizer, step, ok)
    kept = optimizer.state[p]
    return [p.detach().cpu()] + [kept[k].cpu() for k in sorted(kept)]


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
def test_the_hosts_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).with_name("host_adamw.cpp")
    target = tmp_path / "adamw.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{cuda_dir()}"]
    subprocess.run([str(CXX), *flags, str(source), "-o", str(target)], check=True)
    host = ctypes.CDLL(str(target)).adamw8
    wanted = results()
    monkeypatch.setattr(compact, "_has_kernel", lambda piece: piece.kind == "8bit")
    monkeypatch.setattr(compact, "_launch", lambda piece, ok: call(host, piece))
    assert all(map(torch.equal, wanted, results()))


def call(host: Any, piece: compact.Piece) -> None:
    group, state = piece.group, piece.state
    (beta1, beta2), decay = group["betas"], 1 - group["lr"] * group["weight_decay"]
    own = [beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], decay]
    numbers = torch.tensor([*own, float(piece.rate), float(piece.root)], dtype=torch.float32)
    keys = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    tensors = [piece.weight, piece.grad, *(state[k] for k in keys), piece.noise, numbers]
    shape = (ctypes.c_long(s) for s in piece.weight.shape)
    host(*shape, *(ctypes.c_void_p(t.data_ptr()) for t in tensors))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("held", [False, True])
def test_the_kernels_bits(held: bool) -> None:
    ok = torch.tensor(not held, device="cuda")
    ends = []
    for name in ("cuda", "reference"):
        ops.configure(name)  # type: ignore[arg-type]
        try:
            ends.append(results("cuda", ok))
        finally:
            backend._state.backend = "auto"
    assert all(map(torch.equal, *ends))
