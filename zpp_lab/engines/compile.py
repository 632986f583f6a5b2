"""torch.compile, block by block: the one place where it is applied, for every engine.

Only a block's own computation is compiled. What wraps the block (FSDP2's hooks, and ours) stays
outside, so gathers and reductions run as they do without it. Tensor parts exchange inside of their
blocks: there the `regions()` between two exchanges are compiled. Blocks of one shape share their
code. Every engine compiles the same blocks, so they agree to the bit with it as without it;
compiled and uncompiled runs do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MethodType

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import calculate_time_spent
from torch._inductor.async_compile import AsyncCompile

from zpp_lab.models.cut import PartBlock

# What this file leans on beyond the names that it spells out; a test looks for it.
LEANS_ON = {"torch._inductor.config": ("deterministic",)}

Options = dict[str, str | int | bool | Callable[..., object]]


def compile_units(
    units: Iterable[tuple[str, nn.Module]], deterministic: bool, **options: str | int | bool
) -> None:
    """Compile each unit's forward, or its regions, in place, for inputs of one shape at a time.

    `deterministic`: kernels are picked by rule and not by trial, alike on every rank. `options`:
    more of the compiler's. A unit that sees too many shapes is an error: running it uncompiled
    would give other bits.
    """
    if torch.cuda.is_available():  # its workers import torch while the engine is built
        AsyncCompile.warm_pool()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    settings: Options = {"deterministic": True, **options} if deterministic else {**options}
    own: dict[CodeType, CodeType] = {}
    for _, module in units:
        regions: list[tuple[nn.Module, str]] = [(module, "forward")]
        if isinstance(module, PartBlock):
            regions = module.regions()
        for owner, name in regions:
            method = _apart(getattr(owner, name), own)
            compiled = torch.compile(method, options=settings or None, dynamic=False)  # type: ignore[arg-type]
            setattr(owner, name, compiled)


def _apart(forward: Callable[..., object], own: dict[CodeType, CodeType]) -> Callable[..., object]:
    """Return the method with a copy of its code, one for all of a call's units. The compiler keeps
    what it made with the code, so that of another engine neither serves here nor counts against
    the limit."""
    assert isinstance(forward, MethodType), "a module's forward is a method of it"
    function = forward.__func__
    assert isinstance(function, FunctionType), "and written in Python"
    code = function.__code__
    copy = FunctionType(
        own.setdefault(code, code.replace()),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, forward.__self__)


def seconds() -> dict[str, float]:
    """What this process has spent on compiling since `compile_units`, in all and on code; loading
    what a former run compiled is included."""
    spent = calculate_time_spent()
    names = {"compiling in all": "total_wall_time", "compiling, code": "inductor_compile"}
    return {name: float(spent.get(key, 0.0)) for name, key in names.items()}
