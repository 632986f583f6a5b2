"""What a compiled block keeps, and what its backward holds, by torch.compile's graphs.

The block is traced with fake tensors: operators, decompositions and the cut between forward and
backward are those of torch.compile's default backend, and no code is made. Of the backward's graph
we say what lies in memory as Inductor does: what a matrix product, attention, a sum or the caller
needs; what is computed element by element is not stored but made anew by whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

VIEWS = {
    "alias", "as_strided", "expand", "permute", "select", "slice", "split", "squeeze", "t",
    "transpose", "unsqueeze", "view", "_unsafe_view", "reshape", "detach", "getitem",
}  # fmt: skip
STORED = {"mm", "addmm", "bmm", "baddbmm", "sum", "mean", "amax", "amin", "var_mean"}


def compiled_block(
    unit: nn.Module,
    forward: Callable[..., Any],
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int, bool, int]:
    """As `hf_memory`'s counts of a block: bytes kept, whether its input is among them, and what
    its backward holds beyond them. Tensors give shapes; the unit's parameters become fake ones."""
    import torch._dynamo

    graphs: dict[str, GraphModule] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fake_parameters(unit)
        x = _fake(hidden).requires_grad_()
        own = {t.untyped_storage()._cdata for t in unit.parameters()}
        own |= {t.untyped_storage()._cdata for t in unit.buffers()}
        given = tree_map(_fake, (args, kwargs))
        own |= {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
        torch._dynamo.reset()
        run = torch.compile(forward, backend=_noting(graphs), dynamic=False)
        saved: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            made = run(x, *given[0], **given[1])
        out = made[0] if isinstance(made, tuple) else made
        out.backward(torch.empty_like(out))
    torch._dynamo.reset()
    keeps_input = x.untyped_storage()._cdata in saved
    return sum(saved.values()), keeps_input, _most(graphs["backward"].graph)


def _fake_parameters(unit: nn.Module) -> None:
    for module in unit.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(_fake(p), p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = _fake(b)


def _fake(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _noting(graphs: dict[str, GraphModule]) -> Any:
    """torch.compile's default backend up to the two graphs, which run as they are."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def backward(graph: GraphModule, _: Any) -> Any:
        graphs["backward"] = graph
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


# ---------------------------------------------------------------------- the backward's graph


def _most(graph: Any) -> int:
    """The most bytes alive beyond what is there at the start, what comes in apart."""
    nodes = list(graph.nodes)
    stored = {n for n in nodes if _is_stored(n)}
    reads = {n: _read(n, stored) for n in nodes}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        if node in stored or node.op == "output":
            for source in reads[node]:
                last[source] = i
    inputs = [n for n in nodes if n.op == "placeholder"]
    kept = {n for n in inputs if not n.name.startswith("tangents")}
    now = most = sum(_nbytes(n) for n in inputs if n not in kept)
    for i, node in enumerate(nodes):
        if node in stored and node not in inputs:
            now += _nbytes(node)
            most = max(most, now)
        for source in [n for n, at in last.items() if at == i]:
            if not source.name.startswith("primals"):  # weights and tables stay
                now -= _nbytes(source)
    return most


def _is_stored(node: Node) -> bool:
    name = _name(node)
    if node.op == "placeholder" or name in STORED or "attention" in name:
        return True
    return _asked(node) if node.op == "call_function" and name not in VIEWS else False


def _asked(node: Node) -> bool:
    """Whether someone needs its values in memory: a product, attention, or the caller."""
    for user in node.users:
        name = _name(user)
        if user.op == "output" or name in ("mm", "addmm", "bmm", "baddbmm") or "attention" in name:
            return True
        if name in VIEWS and _asked(user):
            return True
    return False


def _read(node: Node, stored: set[Node]) -> set[Node]:
    """What lies in memory of what it is computed from."""
    found: set[Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source in stored:
            found.add(source)
        else:
            todo += source.all_input_nodes
    return found


def _name(node: Node) -> str:
    target: Any = node.target
    if node.op != "call_function":
        return ""
    schema = getattr(target, "_schema", None)
    return str(schema.name).removeprefix("aten::") if schema is not None else target.__name__


def _nbytes(node: Node) -> int:
    values = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return sum(t.numel() * t.dtype.itemsize for t in values)
