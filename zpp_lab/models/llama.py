"""The built-in decoder: Llama style, from half a million parameters to tens of billions.

Every projection is a layer of its own (no fused qkv), because recipes and
telemetry address parameters by name. Parameter names:

    embed.weight                          [vocab, dim]
    layers.N.attention_norm.weight        [dim]
    layers.N.attention.{wq,wo}.weight     [dim, dim]
    layers.N.attention.{wk,wv}.weight     [kv_heads * head_dim, dim]
    layers.N.attention.{q,k}_norm.weight  [head_dim], with model.qk_norm
    layers.N.mlp_norm.weight              [dim]
    layers.N.mlp.{w_gate,w_up}.weight     [ffn, dim]
    layers.N.mlp.w_down.weight            [dim, ffn]
    norm.weight                           [dim]
    head.weight                           [vocab, dim], absent when the head is tied
    score.weight                          [1, dim], in its place with model.scalar_head

There are no buffers: a model built on the meta device is whole once its
parameters are.

Activation checkpointing (`recomputed`; Chen, Xu, Zhang and Guestrin, "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174) keeps of a block that ends with `h + last(g)` only its
input. torch's own hooks every tensor that a forward saves, twice a step, which takes the host
longer than launching the block's kernels. Here a block is one node of the graph, whose backward
runs the block again and the backward of that inside its own. The last product is not computed
again, as nothing needs its result. Bits are those without checkpointing, where a forward uses the
block once. The peak is one tensor of `x`'s size above torch's: autograd keeps the gradient that
came in meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import fused
from zpp_lab.models.generate import Cache
from zpp_lab.models.llama_hf import LlamaStart
from zpp_lab.models.loss import chunked_losses, chunked_scores, mean_of, times, whole_scores
from zpp_lab.models.objective import pair_losses
from zpp_lab.models.start import RunStart, SeededStart, Start

Whole = Callable[[Tensor], Tensor]
UntilLast = Callable[[Tensor], tuple[Tensor, Tensor]]
Crossing = Callable[[int, list[Tensor]], list[Tensor]]


def can_recompute(bypassed: nn.Module, last: nn.Module, x: Tensor) -> bool:
    """Return whether `recomputed` serves. Not where others look into the block: hooks of the
    modules whose call backward leaves out, adapters, autocast, the compiler. Nor where no gradient
    of `x` would call it back."""
    if torch.compiler.is_compiling():  # first: that of torch 2.11 cannot follow the questions below
        return False
    plain = type(last) is nn.Linear and last.bias is None
    looked_at = _hooked(bypassed) or _hooked(last) or _autocast(x.device.type)
    return plain and not looked_at and x.requires_grad


def _autocast(device: str) -> bool:
    available = torch.amp.is_autocast_available(device)  # type: ignore[attr-defined]
    return bool(available and torch.is_autocast_enabled(device))  # asking elsewhere is an error


def _hooked(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def recomputed(whole: Whole, until_last: UntilLast, last: nn.Module, x: Tensor) -> Tensor:
    """Return `whole(x)` = h + last(g); backward computes `h, g = until_last(x)` again. x floating
    [..., dim], which `can_recompute`. Gradients of parameters go to their `.grad`: for
    `loss.backward()`, not for `autograd.grad`, nor for `backward(inputs=...)`. RuntimeError with
    `create_graph=True`."""
    out: Tensor = _Recomputed.apply(whole, until_last, last, x)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Whole, until_last: UntilLast, last: nn.Linear, x: Tensor
    ) -> Tensor:
        ctx.until_last, ctx.last = until_last, last
        ctx.save_for_backward(x)
        return whole(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor | None]:
        if torch.is_grad_enabled():  # create_graph=True turns it on here
            raise RuntimeError("second-order gradients: set model.checkpoint_activations=false")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            h, g = ctx.until_last(x)
            product = _Unneeded.apply(g, ctx.last.weight)  # type: ignore[no-untyped-call]
        del g  # as large as the widest activation, and needed until `product` has gone back alone
        torch.autograd.backward((h, product), (grad, grad))
        return None, None, None, x.grad


class _Unneeded(torch.autograd.Function):
    """`F.linear(x, weight)` whose value nobody reads: its backward alone, by autograd's calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(1).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
        return to_x, to_weight


class Rope:
    """Rotary position tables, shared by all blocks.

    They are neither parameters nor buffers: a change of the model's dtype, or a sharding engine
    that casts what enters a block, would round them.

    Eagerly a rotation is one complex product, and on a GPU one kernel (`fused.py`). The compiler
    makes no code for complex numbers, so it gets the same product written out. Both agree to the
    bit where the complex one rounds each of its products, as vectors of the CPU do; in what fills
    no vector, and in CUDA, a product and a sum may fuse.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.tables: dict[tuple[torch.device, int], Tensor] = {}

    def table(self, length: int, device: torch.device) -> Tensor:
        """Return cosine and sine of each position's turns, fp32 [length, 1, head_dim / 2, 2].
        Cached for good: a captured CUDA graph reads the table at its old place."""
        key = (device, length)
        if key not in self.tables:
            self.tables[key] = self._compute(length).to(device)
        return self.tables[key]

    def _compute(self, length: int) -> Tensor:
        # NumPy's fp64, whatever the model's device or dtype: all rotate by the same numbers.
        turns = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(length), turns)
        turns_of = torch.from_numpy(np.exp(1j * angles).astype(np.complex64))
        return torch.view_as_real(turns_of)[:, None]

    def rotate(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Rotate neighbouring pairs of x [batch, length, heads, head_dim] by their position: the
        place in the row, or with a cache each token's own."""
        if cache is not None:
            table = self.table(cache.slots, x.device)[cache.positions]
            return complex_product(x.float().unflatten(-1, (-1, 2)), table).flatten(-2).to(x.dtype)
        table = self.table(x.shape[1], x.device)
        if fused.serves(x):
            return fused.rotated(x, table)
        product = written_out if torch.compiler.is_compiling() else complex_product
        return product(x.float().unflatten(-1, (-1, 2)), table).flatten(-2).to(x.dtype)


def complex_product(pairs: Tensor, table: Tensor) -> Tensor:
    """Multiply pairs of real and imaginary parts, fp32 [..., 2] each."""
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))


def written_out(pairs: Tensor, table: Tensor) -> Tensor:
    """Compute `complex_product` in real numbers."""
    (a, b), (cosine, sine) = pairs.unbind(-1), table.unbind(-1)
    return torch.stack((a * cosine - b * sine, a * sine + b * cosine), -1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; queries may share keys and values. With
    `qk_norm` queries and keys are normed head by head before they are turned, each with a scale
    that all heads share, so that no logit of attention grows with the weights (Henry et al. 2020,
    arXiv:2010.04245; Dehghani et al. 2023, "ViT-22B", arXiv:2302.05442)."""

    def __init__(self, cfg: ModelConfig, rope: Rope) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.grouped = cfg.kv_heads != cfg.heads
        self.rope = rope
        self.wq = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else nn.Identity()
            for _ in "qk"
        )

    def forward(self, x: Tensor, cache: Cache | None = None, layer: int = 0) -> Tensor:
        split = (-1, self.head_dim)
        q = self.rope.rotate(self.q_norm(self.wq(x).unflatten(-1, split)), cache)
        k = self.rope.rotate(self.k_norm(self.wk(x).unflatten(-1, split)), cache)
        v = self.wv(x).unflatten(-1, split)
        if cache is not None:
            keys, values = cache.update(layer, k, v)
            grouped, mask = self.grouped, cache.mask
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=grouped
            )
            return self.wo(out.transpose(1, 2).flatten(-2))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.wo(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.w_up = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.w_down = nn.Linear(cfg.ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.until_last(x))

    def until_last(self, x: Tensor) -> Tensor:
        gate = self.w_gate(x)
        if fused.serves(gate):
            return fused.swiglu(gate, self.w_up(x))
        gate = F.silu(gate)  # in its place
        return gate * self.w_up(x)


class Block(nn.Module):
    """One decoder layer: the unit that sharding gathers and reduces."""

    def __init__(self, cfg: ModelConfig, rope: Rope) -> None:
        super().__init__()
        self.checkpoint = cfg.checkpoint_activations
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attention = Attention(cfg, rope)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = SwiGLU(cfg)

    def forward(self, x: Tensor, cache: Cache | None = None, layer: int = 0) -> Tensor:
        if cache is not None:
            x = x + self.attention(self.attention_norm(x), cache, layer)
            return x + self.mlp(self.mlp_norm(x))
        # Inside the block, so that whoever wraps the block gathers its weights once a pass.
        if not self.checkpoint or not torch.is_grad_enabled():
            return self._compute(x)
        if can_recompute(self.mlp, self.mlp.w_down, x):
            return recomputed(self._compute, self._until_last, self.mlp.w_down, x)
        return checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False)

    def _compute(self, x: Tensor) -> Tensor:
        x = self._attend(x)
        return x + self.mlp(self.mlp_norm(x))

    def _until_last(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and g: `_compute` is h + `mlp.w_down`(g)."""
        x = self._attend(x)
        return x, self.mlp.until_last(self.mlp_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x))


def through(block: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run a block on one tensor, or on those of several tensor parts."""
    out = block(*xs)
    return list(out) if isinstance(out, tuple) else [out]


class Embedding(nn.Embedding):
    """torch's, without first values on the meta device, which would load torch's compiler."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def rows_of_vocabulary(cfg: ModelConfig, vocab_size: int) -> int:
    """Return the model's own, of at least the tokenizer's `vocab_size`; ValueError for fewer."""
    if 0 < cfg.vocab_size < vocab_size:
        raise ValueError(
            f"model.vocab_size={cfg.vocab_size} is smaller than the tokenizer's {vocab_size}: "
            "raise it, set 0 to take the tokenizer's, or take a smaller tokenizer"
        )
    return cfg.vocab_size or vocab_size


class Llama(nn.Module):
    """A decoder-only language model. `units()` are its blocks; the rest is the root unit."""

    gives_token_scores = True  # `each`: held-out losses need no whole logits either
    same_every_step = True  # a CUDA graph may hold forward and backward
    crossing: Crossing = staticmethod(lambda block, xs: xs)  # what follows each block

    def __init__(self, cfg: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.temperature = 1.0  # of losses: logits are divided by it, as rollouts' are
        self.rope = rope = Rope(cfg.dim // cfg.heads, cfg.rope_theta)
        self.embed = Embedding(vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg, rope) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        no_logits = cfg.tied_head or cfg.scalar_head
        self.head = None if no_logits else nn.Linear(cfg.dim, vocab_size, bias=False)
        self.score = nn.Linear(cfg.dim, 1, bias=False) if cfg.scalar_head else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        share: Tensor | None = None,
        each: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy in nats (fp32 scalar), or logits when there are no targets.
        tokens, targets: int64 [batch, length]. Logits: [batch, length, vocab] in the parameters'
        dtype. `share`: see `mean_of`, for targets that do not all count. `each`: every target's own
        scores (`token_scores`), fp32 [2, batch · length]; the loss of one that is IGNORED is 0.
        `cache`, for generation: logits [batch, vocab] of the places that it wants. With a scalar
        head: scores, fp32 [batch, length], or what `pair_losses` makes of them."""
        # Here, so that no compiled block ever makes a table: the others would find it made, and
        # be compiled a second time.
        self.rope.table(tokens.shape[1] if cache is None else cache.slots, tokens.device)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            (x,) = self.crossing(i, [layer(x) if cache is None else layer(x, cache, i)])
        x = self.norm(x if cache is None else cache.wanted(x))
        if self.score is not None:
            scores = F.linear(x.float(), self.score.weight.float())[..., 0]
            return scores if targets is None else pair_losses(scores, targets, each)
        if targets is None:
            logits = F.linear(x, self._head())
            return logits if cache is None else logits[:, 0]
        return self._losses(x, targets, share, each)

    def see(self, tokens: Tensor) -> None:
        """Prepare a forward of these tokens, wherever it begins."""
        self.rope.table(tokens.shape[1], tokens.device)

    def enter(self, tokens: Tensor) -> list[Tensor]:
        """Return what the first block gets: one tensor, of tensor parts one each."""
        return [self.embed(tokens)]

    def leave(
        self, xs: Sequence[Tensor], targets: Tensor, share: Tensor | None = None, each: bool = False
    ) -> Tensor:
        """Return the loss of what the last block gave, or scores, as `forward`."""
        (x,) = xs
        return self._losses(self.norm(x), targets, share, each)

    def _head(self) -> Tensor:
        # A tied head reads the embedding here rather than sharing a Parameter object:
        # materialising a meta model would silently break the sharing.
        return self.embed.weight if self.head is None else self.head.weight

    def _losses(self, x: Tensor, targets: Tensor, share: Tensor | None, each: bool) -> Tensor:
        head = self._head()
        if self.temperature != 1.0:
            x = x / self.temperature
        if self.cfg.loss_chunk or self.cfg.z_loss:
            rows, chunk = x.flatten(0, 1), self.cfg.loss_chunk or targets.numel()
            if each:
                return chunked_scores(rows, head, targets.flatten(), chunk)
            losses = chunked_losses(rows, head, targets.flatten(), chunk, self.cfg.z_loss)
            return losses.mean() if share is None else times(losses.sum(), share)
        logits = F.linear(x, head).flatten(0, 1)
        if each:
            return whole_scores(logits, targets.flatten())
        return mean_of(logits, targets.flatten(), share)

    def units(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks in the order in which forward runs them, with their names."""
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]

    def start(self, seed: int) -> Start:
        """Return the first weights: every parameter from (seed, name, shape), see `init.py`, or
        from the folder or the run that the config names."""
        seeded = SeededStart(self, seed, self.cfg)
        if self.cfg.start:
            return RunStart(self, Path(self.cfg.start), seeded)
        if self.cfg.weights == "pretrained":
            return LlamaStart(self, self.cfg, self.vocab_size, seeded)
        return seeded
