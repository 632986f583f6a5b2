"""What a model of transformers keeps for its backward, and what that backward holds.

Its families differ in what they compute (norms written out or fused, ReLU, biases, branches side by
side), and the same family from one release of transformers to the next. So no formula says it: the
model's own code runs on shapes, one block and what is around the blocks, and what is alive is
counted. No weight is read and nothing is allocated.

Weights, and what comes of them, are on the meta device; integers, masks and tables are computed,
because models look at them (do positions restart within a sequence?). What is alive is counted
storage by storage, so views cost nothing and whatever autograd saves stays until it is used.
Compiled blocks (engine.compile) are counted as eager ones, which nearly always keep more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zpp_lab.config.model import ModelConfig
from zpp_lab.config.wires import ACTS_FORWARD, Wire
from zpp_lab.models import build_model, build_parts
from zpp_lab.models.cut import Parted
from zpp_lab.train.memory.activations import Slices

FP32 = 4  # bytes
Forward = Callable[..., Any]


@contextmanager
def shapes_only() -> Iterator[Live]:
    """Run operators on shapes in the body, attention as a fused one; yields counts."""
    with _FusedAttention(), Live() as live:
        yield live


class Live(TorchDispatchMode):
    """Bytes alive of what operators made inside: `now`, and the `most` since it was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _on_one_device(args, dict(kwargs or {}))
        given = {_key(t) for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for t in _tensors(out):
            if _key(t) not in given | self.known:
                self._born(t.untyped_storage())
        return out

    def start(self) -> int:
        """Restart `most` here, and return the bytes alive."""
        self.most = self.now
        return self.now

    def held(self, tree: Any) -> int:
        """Return the bytes of the storages in `tree` that were made inside."""
        storages = {_key(t): t.untyped_storage().nbytes() for t in _tensors(tree)}
        return sum(nbytes for which, nbytes in storages.items() if which in self.known)

    def _born(self, storage: torch.UntypedStorage) -> None:
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, which: int, size: int) -> None:
        self.known.discard(which)
        self.now -= size


def _on_one_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make all tensors shapes if one is; otherwise keep everything off the meta device."""
    if any(t.is_meta for t in _tensors((args, kwargs))):
        return tree_map(_shape, args), tree_map(_shape, kwargs)
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


def _shape(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


class _FusedAttention(TorchFunctionMode):
    """For shapes torch would write attention out, as no device does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    out: Tensor = _Attention.apply(query, key, value, attn_mask)
    return out


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, output and one fp32 number a head, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = q.shape
        # in memory as queries are: whoever wants another order makes a copy, and keeps it
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(batch, heads, length).float())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


class ShapeExchanges:
    """Allocates what a tensor part's exchanges allocate (`collectives.acts.Parts`)."""

    at_head: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def gather(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        if place == "head" and wire == ACTS_FORWARD:
            self.at_head()
        (x,), _payload = xs, self._payload(wire, xs[0])
        return [x.new_empty(self.slices.tp * x.shape[0], *x.shape[1:])]

    def scatter(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,), _sent, _received = xs, self._payload(wire, xs[0]), self._payload(wire, xs[0])
        return [x.new_empty(x.shape[0] // self.slices.tp, *x.shape[1:])]

    def raw(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.new_empty(self.slices.tp, *x.shape) for x in xs]

    def _payload(self, wire: Wire, x: Tensor) -> Tensor:
        row = self.slices.forward if wire == ACTS_FORWARD else self.slices.backward
        return x.new_empty(self.slices.tp, row, dtype=torch.uint8)


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


@dataclass(frozen=True, kw_only=True)
class TracedActivations(Traced):
    """`activations.Activations` of a model of transformers."""

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
        slices: Slices,
    ) -> TracedActivations:
        """Trace a model on a micro-batch of `shape` (sequences, tokens); ValueError if it fails."""
        light, model = model.checkpoint_activations, replace(model, checkpoint_activations=False)
        found = _kept_trace(_Key(model), vocab, shape, dtype, slices)
        return cls(**vars(found), layers=layers, checkpointed=light, chunk=model.loss_chunk)

    @property
    def between(self) -> int:
        return self.row if self.checkpointed else self.block

    @property
    def kept(self) -> int:
        return self.layers * self.between + self.shared + self.outside

    @property
    def recomputed(self) -> int:
        return self.block - self.row * self.keeps_input if self.checkpointed else 0

    def backward(self, grads: int) -> int:
        """Return the flow, which includes `grads`."""
        return self.flow

    @property
    def heldout_loss(self) -> int:
        """As `Activations.heldout_loss`; in fp32 next to the model's own, or their logarithms."""
        width = self.itemsize
        each = width + FP32 if self.chunk else max(width + FP32, 2 * FP32)
        return self.row + each * min(self.chunk or self.tokens, self.tokens) * self.outs


@dataclass(frozen=True)
class _Key:
    """A model's settings, which hold lists and mappings, by what they say."""

    model: ModelConfig

    def __hash__(self) -> int:
        return hash(repr(self.model))


@lru_cache(maxsize=64)
def _kept_trace(
    key: _Key, vocab: int, shape: tuple[int, int], dtype: torch.dtype, slices: Slices
) -> Traced:
    if slices.tp > 1:
        model = build_parts(key.model, vocab, slices.tp, "meta")[0]
        model.join((model,), ShapeExchanges(slices))
    else:
        model = build_model(key.model, vocab, "meta")
    for p in model.parameters():
        p.data = p.data.to(dtype)
    try:
        return trace(model, shape)
    except ValueError:  # of the settings
        raise
    except Exception as error:  # of the model's own code, whatever it does
        raise ValueError(
            f"{type(model).__name__} cannot be traced on shapes ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); use a model.* preset of the same shape"
        ) from error


def trace(model: Any, shape: tuple[int, int]) -> Traced:
    """Trace a model of `build_hf`, parameters on the meta device. It cannot run afterwards."""
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
        kept, keeps_input, flow = _one_block(own, hidden, args, kwargs, live)
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
        if isinstance(model, Parted):  # whose head is read, not called
            model.exchanges.at_head = self._at_head  # type: ignore[union-attr]
        model.get_output_embeddings().register_forward_pre_hook(self._at_head)

    def run(self, tokens: Tensor) -> tuple[int, int]:
        """Return the bytes kept between the last block and the head, and the most beyond them."""
        self.model(tokens, tokens).backward()
        most = self.live.most
        self.model.zero_grad(set_to_none=True)
        return self.at_head - self.live.held(self.given), most - self.at_head

    def _at_head(self, *_: Any) -> None:
        self.at_head = self.live.start()

    def _passing(self, forward: Forward, noted: bool, last: bool) -> Forward:
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
    forward: Forward, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], live: Live
) -> tuple[int, bool, int]:
    """Return the bytes that its forward keeps, whether its input is among them, and the most that
    its backward holds beyond them, from the incoming gradient on."""
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
    forward: Forward, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], live: Live
) -> int:
    """Return the most of a forward without gradients, its input included."""
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
