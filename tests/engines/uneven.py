"""A small model with every awkward shape: padding, empty shards, a scalar-like gate, biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, ffn)
        self.down_proj = nn.Linear(ffn, dim, bias=False)
        self.gate = nn.Parameter(torch.ones(3))  # shorter than most worlds: empty shards

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate[0] * self.down_proj(F.gelu(self.up(self.norm(x)))) * self.gate[1]


class Uneven(nn.Module):
    """Takes tokens and targets [B, T] and returns the mean cross-entropy; logits without
    targets."""

    def __init__(self, vocab: int = 37, dim: int = 24, ffn: int = 53, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.unused = nn.Parameter(torch.ones(5, 3))  # never gets a gradient
        self.frozen = nn.Parameter(torch.full((dim,), 0.01), requires_grad=False)

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.frozen
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_uneven(seed: int = 0) -> Uneven:
    torch.manual_seed(seed)
    return Uneven()


def batch(step: int, rank: int, micro: int, vocab: int = 37) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 10 * rank + micro)
    tokens = torch.randint(0, vocab, (2, 9), generator=generator)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
