"""What a model of transformers keeps for its backward, and what that backward holds.

Its families differ in what they compute (norms written out or fused, ReLU, biases, branches side by
side), and the same family from one release of transformers to the next. So no formula says it: the
model's own code runs on shapes (`shape_run.py`), one block and what is around the blocks, and what
is alive is counted. No weight is read and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config import ModelConfig
from zpp_lab.models.build import build_model
from zpp_lab.models.shape_run import Live, shapes_only

FP32 = 4


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank's forward and backward of some tokens.

    row: of what goes from block to block. block: kept by one block; keeps_input: its input too.
    flow: the most that a block's backward holds beyond that, gradients of its parameters included.
    shared: tables and masks that all blocks use. outside: kept by what follows the last block, up
    to the head. loss: logits and what the loss makes of them, at the largest. head: elements of the
    head's trained parameters. tied: the head is the embedding. passing: the most of a block that
    runs without gradients. outs: logits of a token. itemsize: of a logit.
    """

    row: int
    block: int
    keeps_input: bool
    flow: int
    shared: int
    outside: int
    loss: int
    head: int
    tied: bool
    passing: int
    outs: int
    tokens: int
    itemsize: int


@dataclass(frozen=True)
class TracedActivations:
    """`activations.Activations` of a model of transformers."""

    found: Traced
    layers: int
    checkpointed: bool
    chunk: int = 0

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        vocab: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        layers: int,
        compiled: bool = False,
    ) -> TracedActivations:
        """`shape`: sequences and tokens each of a micro-batch. ValueError for a model that does
        not run on shapes."""
        light, model = model.checkpoint_activations, replace(model, checkpoint_activations=False)
        found = _kept_trace(_Key(model), vocab, shape, dtype, compiled)
        return cls(found, layers, light, model.loss_chunk)

    @property
    def row(self) -> int:
        return self.found.row

    @property
    def block(self) -> int:
        return self.found.block

    @property
    def between(self) -> int:
        return self.row if self.checkpointed else self.block

    @property
    def kept(self) -> int:
        return self.layers * self.between + self.found.shared + self.found.outside

    @property
    def recomputed(self) -> int:
        if not self.checkpointed:
            return 0
        return self.block - (self.row if self.found.keeps_input else 0)

    def backward(self, grads: int) -> int:
        """`grads` are in it: they were counted with the rest."""
        return self.found.flow

    @property
    def loss(self) -> int:
        return self.found.loss

    @property
    def passing(self) -> int:
        return self.found.passing

    @property
    def heldout_loss(self) -> int:
        """As `Activations.heldout_loss`; in fp32 beside the model's own, or their logarithms."""
        width = self.found.itemsize
        each = width + FP32 if self.chunk else max(width + FP32, 2 * FP32)
        tokens = self.found.tokens
        return self.row + each * min(self.chunk or tokens, tokens) * self.found.outs

    @property
    def head(self) -> int:
        return self.found.head

    @property
    def tied(self) -> bool:
        return self.found.tied


@dataclass(frozen=True)
class _Key:
    """A model's settings, which hold lists and mappings, by what they say."""

    model: ModelConfig

    def __hash__(self) -> int:
        return hash(repr(self.model))


@lru_cache(maxsize=64)
def _kept_trace(
    key: _Key, vocab: int, shape: tuple[int, int], dtype: torch.dtype, compiled: bool
) -> Traced:
    model = build_model(key.model, vocab, "meta")
    for p in model.parameters():
        p.data = p.data.to(dtype)
    try:
        return trace(model, shape, compiled)
    except ValueError:  # of the settings
        raise
    except Exception as error:  # of the model's own code, whatever it does
        raise ValueError(
            f"{type(model).__name__} does not run on shapes alone, so nobody knows what its "
            f"activations take ({type(error).__name__}: {str(error).splitlines()[0]}); take a "
            "model.* preset of the same shape"
        ) from error


def trace(model: Any, shape: tuple[int, int], compiled: bool = False) -> Traced:
    """`model`: as `build_hf` makes it, parameters on the meta device in the dtype that computes.
    It cannot run afterwards."""
    tokens = torch.zeros(shape, dtype=torch.int64)
    units = [unit for _, unit in model.units()]
    largest = max(units, key=lambda unit: sum(p.numel() for p in unit.parameters()))
    own, head = largest.forward, model.get_output_embeddings()
    with shapes_only() as live:
        around = _Around(model, live, units, largest)
        outside, loss = around.run(tokens)
        hidden, args, kwargs = around.given
        shared = live.held((args, kwargs))
        passing = _passing(own, hidden, args, kwargs, live)
        if not compiled:
            kept, keeps_input, flow = _one_block(own, hidden, args, kwargs, live)
    if compiled:
        from zpp_lab.models.compiled_block import compiled_block  # loads the compiler

        kept, keeps_input, flow = compiled_block(largest, own, hidden, args, kwargs)
    return Traced(
        row=hidden.nbytes,
        block=kept,
        keeps_input=keeps_input,
        flow=flow,
        shared=shared,
        outside=outside,
        loss=loss,
        head=sum(p.numel() for p in head.parameters() if p.requires_grad),
        tied=head.weight is model.get_input_embeddings().weight,
        passing=passing,
        outs=head.weight.shape[0],
        tokens=tokens.numel(),
        itemsize=head.weight.itemsize,
    )


class _Around:
    """Runs a model whose blocks pass on what they get."""

    def __init__(self, model: Any, live: Live, units: list[nn.Module], largest: nn.Module) -> None:
        self.model, self.live = model, live
        self.given: tuple[Tensor, tuple[Any, ...], dict[str, Any]]  # of the largest block
        self.at_head = 0
        for unit in units:
            passing = self._passing(unit.forward, unit is largest, unit is units[-1])
            unit.forward = passing  # type: ignore[method-assign]
        model.get_output_embeddings().register_forward_pre_hook(self._at_head)

    def run(self, tokens: Tensor) -> tuple[int, int]:
        """Bytes kept between the last block and the head; the most beyond them."""
        self.model(tokens, tokens).backward()
        most = self.live.most
        self.model.zero_grad(set_to_none=True)
        return self.at_head - self.live.held(self.given), most - self.at_head

    def _at_head(self, *_: Any) -> None:
        self.at_head = self.live.start()

    def _passing(self, forward: Callable[..., Any], noted: bool, last: bool) -> Callable[..., Any]:
        def passing(*args: Any, **kwargs: Any) -> Any:
            if not args:
                raise RuntimeError("a block gets its input by name")
            with torch.no_grad():  # for the form of what it returns
                made = forward(*args, **kwargs)
            if noted:
                self.given = args[0], args[1:], kwargs
            out = _begin(args[0]) if last else args[0]  # where the blocks' backward would begin
            return (out, *made[1:]) if isinstance(made, tuple) else out

        return passing


def _one_block(
    forward: Callable[..., Any],
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    live: Live,
) -> tuple[int, bool, int]:
    """Bytes that its forward keeps; whether its input is among them; what its backward holds
    beyond them at the most, from the gradient that comes in on."""
    comes_in = torch.empty_like(hidden)
    there = live.now
    x = _begin(hidden)
    made = forward(x, *args, **kwargs)
    out = made[0] if isinstance(made, tuple) else made
    del made
    before = live.now
    del x
    kept = live.start() - there - out.nbytes  # it belongs to the next block
    keeps_input = live.now == before
    out.backward(comes_in)
    return kept, keeps_input, live.most - there - out.nbytes - kept + comes_in.nbytes


@torch.no_grad()
def _passing(
    forward: Callable[..., Any],
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    live: Live,
) -> int:
    """The most of a forward without gradients, its input included."""
    there = live.start()
    forward(hidden, *args, **kwargs)
    return live.most - there + hidden.nbytes


def _begin(x: Tensor) -> Tensor:
    out: Tensor = _Begin.apply(x.detach(), torch.empty(0, requires_grad=True))
    return out


class _Begin(torch.autograd.Function):
    """A copy that asks for a gradient, but is no leaf: only who needs it keeps it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
