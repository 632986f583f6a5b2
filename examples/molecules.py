"""A molecular encoder trained with quantized collectives, in a loop of its own.

Message passing over small molecule graphs, with an information bottleneck: each molecule's
code is drawn from a normal distribution, kept close to the unit normal, and must still predict
the molecule's properties. The molecules are made up, so that nothing is downloaded.

    torchrun --standalone --nproc-per-node 4 examples/molecules.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zpp_lab.api as zpp
from zpp_lab.config.schema import ClusterConfig, RecipeConfig

ATOMS, PROPERTIES = 9, 4  # kinds of atoms; numbers to predict


@dataclass(frozen=True)
class Molecules:
    """A batch of graphs side by side. atoms int64 [n]; bonds int64 [2, m], both directions;
    owner int64 [n]: each atom's molecule; properties fp32 [molecules, PROPERTIES]."""

    atoms: Tensor
    bonds: Tensor
    owner: Tensor
    properties: Tensor


def molecules(step: int, rank: int, count: int = 16, size: int = 12) -> Molecules:
    """Random trees with a few rings; properties depend on neighbouring atoms."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    atoms = torch.randint(0, ATOMS, (count * size,), generator=rng)
    first = torch.arange(count).repeat_interleave(size - 1) * size
    child = torch.arange(1, size).repeat(count)
    parent = (torch.rand(len(child), generator=rng) * child).long()
    bonds = torch.stack((first + child, first + parent))
    bonds = torch.cat((bonds, bonds.flip(0)), dim=1)
    owner = torch.arange(count).repeat_interleave(size)
    pairs = (atoms[bonds[0]] * atoms[bonds[1]]).float()
    sums = torch.zeros(count).index_add(0, owner[bonds[0]], pairs) / bonds.shape[1]
    properties = torch.stack([torch.sin(sums * (k + 1) * 4) for k in range(PROPERTIES)], dim=1)
    return Molecules(atoms, bonds, owner, properties)


class MessagePassing(nn.Module):
    """Each atom adds what its neighbours send."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.send = nn.Linear(width, 2 * width)
        self.take = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, bonds: Tensor) -> Tensor:
        sent = F.gelu(self.send(self.norm(x)))
        heard = torch.zeros_like(sent).index_add(0, bonds[1], sent[bonds[0]])
        return x + self.take(heard)


class MoleculeEncoder(nn.Module):
    """Graphs in, loss out: prediction error plus the price of the code's information."""

    def __init__(self, width: int = 256, layers: int = 4, code: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(ATOMS, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(layers))
        self.code = nn.Linear(width, 2 * code)  # mean and log-variance
        self.predict = nn.Linear(code, PROPERTIES)

    def forward(self, batch: Molecules, price: float = 1e-3) -> Tensor:
        x = self.embed(batch.atoms)
        for layer in self.layers:
            x = layer(x, batch.bonds)
        count = len(batch.properties)
        pooled = torch.zeros(count, x.shape[1], dtype=x.dtype, device=x.device)
        pooled = pooled.index_add(0, batch.owner, x) / (len(batch.owner) / count)
        mean, log_variance = self.code(pooled).float().chunk(2, dim=1)
        drawn = mean + torch.exp(log_variance / 2) * self._noise(mean)
        error = F.mse_loss(self.predict(drawn.to(x.dtype)).float(), batch.properties)
        information = (mean**2 + log_variance.exp() - log_variance - 1).sum(1).mean() / 2
        return error + price * information

    def _noise(self, like: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(like.shape[0])
        return torch.randn(like.shape, generator=rng).to(like.device)


def train(
    model: MoleculeEncoder,
    recipe: RecipeConfig | str,
    cluster: ClusterConfig | None = None,
    steps: int = 100,
) -> tuple[list[float], zpp.Sharded]:
    """The loop: two lines of it are zpp_lab's."""
    sharded = zpp.shard(model, recipe, cluster, units=list(model.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(molecules(step, dist.get_rank()))
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sharded


def main() -> None:
    zpp.init("gloo")
    torch.manual_seed(0)
    losses, sharded = train(MoleculeEncoder(), "zeropp")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
        print({wire: tuple(sent) for wire, sent in sharded.bytes.items()})
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at Python's end a thread of gloo's that still frees a tensor would abort it


if __name__ == "__main__":
    main()
