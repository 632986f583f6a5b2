"""The buffer that FSDP2 gets in place of a tensor: it has a size, and a packet for content.

FSDP2's own copy-in and copy-out operators land in `Packed.__torch_dispatch__`. An operator that
`Packed` does not know gets a plain buffer, and what was asked for does not happen: `Fallbacks`
counts it, and the engine ends the step with an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from zpp_lab.collectives.gather import Packet


class Fallbacks:
    """How often FSDP2 went past our collectives, by operator."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def note(self, what: str) -> None:
        self.seen[what] += 1

    def check(self, allowed: bool) -> bool:
        """Whether there were any since the last check: RuntimeError unless `allowed`."""
        seen, self.seen = self.seen, Counter()
        if seen and not allowed:
            listed = ", ".join(f"{name} ({count} times)" for name, count in sorted(seen.items()))
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} bypassed the recipe's collectives: {listed}. "
                "Use a torch version that zpp_lab supports, or engine.allow_fallback=true to "
                "send plain tensors there"
            )
        return bool(seen)


class Owner(Protocol):
    """The gather or the reduction that a buffer is for; a gather packs and unpacks."""

    fallbacks: Fallbacks


@dataclass(slots=True)
class Box:
    """What a packed buffer really holds; its views share it."""

    owner: Owner
    numel: int
    dtype: torch.dtype
    device: torch.device
    packet: Packet | None = None  # of a gather
    grads: Sequence[Tensor] = ()  # of a reduction
    plain: Tensor | None = None  # after an operator that we do not know

    def materialize(self, operator: str) -> Tensor:
        self.owner.fallbacks.note(operator)
        if self.packet is not None or self.grads:
            raise RuntimeError(
                f"{operator} on a buffer that is encoded already; please report this"
            )
        if self.plain is None:
            self.plain = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        return self.plain


class Packed(Tensor):
    """A buffer for FSDP2 that has a size, a dtype and a device, but a packet for content."""

    box: Box

    @staticmethod
    def __new__(cls, box: Box, size: Sequence[int]) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, size, dtype=box.dtype, device=box.device)
        made.box = box
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, {self.dtype})"

    def view(self, *size: Any) -> Tensor:  # type: ignore[override]
        """For [W, -1], which FSDP2 asks for once a collective, without the dispatcher's way."""
        if len(size) == 2 and type(size[0]) is int and size[1] == -1:
            return Packed(self.box, (size[0], self.box.numel // size[0]))
        return super().view(*size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = _name(func)
        handler = HANDLERS.get(name)
        out = handler(*args, **(kwargs or {})) if handler else NotImplemented
        if out is not NotImplemented:
            return out

        def plain(x: Any) -> Any:
            return x.box.materialize(name).view(x.shape) if isinstance(x, Packed) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@cache
def _name(operator: Any) -> str:
    return str(operator._schema.name)


def _view(buffer: Packed, size: Sequence[int]) -> Packed:
    return Packed(buffer.box, _resolved(size, buffer.numel()))


def _detach(buffer: Packed) -> Packed:
    return Packed(buffer.box, buffer.shape)


def _resolved(size: Sequence[int], numel: int) -> list[int]:
    known = math.prod(s for s in size if s != -1)
    return [numel // max(1, known) if s == -1 else s for s in size]


def _copy_in(inputs: Any, output: Any, splits: Any, numel: int, rank: int) -> Any:
    if not isinstance(output, Packed) or output.box.plain is not None:
        return NotImplemented
    return output.box.owner.copy_in(output, inputs)  # type: ignore[attr-defined]


def _copy_out(output: Any, splits: Any, dim: int = 0, *, out: Any) -> Any:
    if not isinstance(output, Packed) or output.box.packet is None or dim != 1:
        return NotImplemented
    output.box.owner.unpack(output.box.packet, out)  # type: ignore[attr-defined]
    return None


def _chunk_cat(tensors: Any, dim: int, num_chunks: int, *, out: Any) -> Any:
    if not isinstance(out, Packed) or dim != 0 or out.box.plain is not None:
        return NotImplemented
    out.box.grads = tensors
    return None


def _copy(out: Tensor, source: Any, non_blocking: bool = False) -> Any:
    """FSDP2's reduction by one rank of a mesh of its own: others have copies, as it cannot know."""
    if isinstance(out, Packed) or not source.box.grads:
        return NotImplemented
    source.box.owner(out, source, None, dist.ReduceOp.AVG)
    return out


HANDLERS: dict[str, Callable[..., Any]] = {
    "aten::view": _view,
    "aten::detach": _detach,
    "aten::copy_": _copy,
    "fsdp::all_gather_copy_in": _copy_in,
    "fsdp::split_with_sizes_copy": _copy_out,
    "fsdp::chunk_cat": _chunk_cat,
    "fsdp::chunk_cat_mixed_dtype": _chunk_cat,
}
