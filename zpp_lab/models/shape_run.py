"""Runs a model's own code on shapes alone, and counts the memory that it would take.

Weights, and what comes of them, are on the meta device; integers, masks and tables are computed,
because models look at them (do positions start anew within a sequence?). What is alive is counted
storage by storage, so views cost nothing and whatever autograd saves stays until it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


@contextmanager
def shapes_only() -> Iterator[Live]:
    """Inside, operators run on shapes, attention as a fused one; counts of what they make."""
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
        """From here on `most` counts; what is there already."""
        self.most = self.now
        return self.now

    def held(self, tree: Any) -> int:
        """Bytes of the storages in `tree` that were made inside."""
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
    """Beside a shape all are shapes; without one nothing goes to the meta device."""
    given = _tensors((args, kwargs))
    if any(t.is_meta for t in given):
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
