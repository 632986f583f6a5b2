"""This rank's tensor part: what it exchanges with those that read the same batch, outside of FSDP2.

FSDP2 shards a part over the ranks of its cell. Parts are cut before that, as plain parameters, so
no collective of torch's runs between them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten

from zpp_lab.collectives.acts import Parts
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Bytes, Plan, add_bytes, leg_bytes
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.cluster import CELL, ClusterConfig
from zpp_lab.config.wires import ACTS_FORWARD, Wire
from zpp_lab.engines.frozen import mark_all
from zpp_lab.engines.fsdp.base import own_rows, place_in_whole
from zpp_lab.engines.fsdp.comm import managed
from zpp_lab.engines.fsdp.mesh import Ranks, mesh_of_parts
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.optim.shards import local
from zpp_lab.models.cut import ROWS, Parted, cut_dim, map_state, part_state
from zpp_lab.models.stages import stage_state
from zpp_lab.runs.checkpoint.read import Rows, State

_PLAIN = (Tensor, int, float, str, type(None))  # what parts compare


def cell_of(cluster: ClusterConfig, device: torch.device) -> Ranks | None:
    """Return the ranks of this one's cell, with the mesh that FSDP2 shards over; None where they
    are all."""
    if not cluster.split:
        return None
    axes = {"node": "nodes", "gpu": "gpus"}
    names = tuple(axes.get(axis, axis) for axis in cluster.axes)
    shape = tuple(cluster.axes.values())
    found = Ranks.pick(init_device_mesh(device.type, shape, mesh_dim_names=names), None)
    assert list(found.ranks) == cluster.members(CELL, dist.get_rank())
    return found


class OwnPart(Parts):
    """The exchanges of this rank's part, number `part` of those that read its batch."""

    def __init__(
        self, model: Parted, plan: Plan, cluster: ClusterConfig, clock: Clock, watchdog: Watchdog
    ) -> None:
        assert plan.parts is not None
        ranks = cluster.members({"tp"}, dist.get_rank())
        among = ProcessGroups(ClusterConfig(1, cluster.tp), watchdog, ranks)
        super().__init__(plan.parts, clock, Ledger(), among)
        self.reader, self.part = reader_of(cluster), among.rank
        self.world = cluster.readers * cluster.tp  # of this stage
        every = [p for unit in plan.units for p in unit.unit.parameters]
        self.shared = {p.name: p.shard_numel for p in every if p.parts == 1}
        model.join((model,), self)

    def add_shared(self, grads: dict[str, Tensor]) -> None:
        """Sum the shards of gradients of parameters that all parts have, in one exchange."""
        names = sorted(self.shared)
        sizes = [self.shared[name] for name in names]
        rows = torch.zeros(sum(sizes), device=next(iter(grads.values())).device)
        for name, row in zip(names, rows.split(sizes), strict=True):
            if name in grads:
                row[: grads[name].numel()] = grads[name].flatten()
        (total,) = self.sum("shared gradients", [rows])
        for name, row in zip(names, total.split(sizes), strict=True):
            if name in grads:
                grads[name].copy_(row[: grads[name].numel()].view_as(grads[name]))

    def counted(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients whose squares this rank adds to the norm."""
        return {n: g for n, g in grads.items() if self.part == 0 or n not in self.shared}

    def every(self, cell: Bytes) -> Bytes:
        """Return what all ranks have sent, where those of a cell sent `cell`. LedgerError where
        parts exchanged something else than planned."""
        ledger = self.ledger
        ledger.step = {wire: sent * self.world for wire, sent in ledger.step.items()}
        planned = leg_bytes(self.plan.legs())
        ledger.check(planned)
        add_bytes(planned, cell, self.tp)
        return planned


def by_stage(every: Tensor, cluster: ClusterConfig) -> Tensor:
    """Order what all ranks gave, [ranks, *], as [stages, ranks of each, *]; a view, so that no host
    waits for an index."""
    axes = cluster.axes
    return every.unflatten(0, tuple(axes.values())).movedim(list(axes).index("pp"), 0).flatten(1, 3)


def reader_of(cluster: ClusterConfig) -> int:
    """Return this rank's place in its cell."""
    rank = dist.get_rank()
    return cluster.members(CELL, rank).index(rank)


def _backward() -> int:
    """Return the number of the backward under way in this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


class LoopParts(OwnPart):
    """The same in a user training loop, which announces neither the number of tokens nor the last
    micro-step. `plans`: by the steps done when each begins.

    Gradients of parameters that all parts have are summed at the end of each backward, so that the
    loop reads sums. Those of earlier backwards are set aside at its start and added at its end.
    """

    def __init__(
        self,
        model: Parted,
        plans: Mapping[int, Plan],
        cluster: ClusterConfig,
        clock: Clock,
        watchdog: Watchdog,
    ) -> None:
        super().__init__(model, plans[0], cluster, clock, watchdog)
        self.plans, self.cluster = plans, cluster
        self.backwards = self.tokens = 0  # those that have ended; of the last forward
        self.model, self.classes = model, model.embed.weight.shape[0] * self.tp
        self.compared: set[tuple[str, ...]] = set()  # what parts have compared, by names
        self.running = -1  # the backward under way
        self.seen: int | None = None  # in which `_backward` the forward has read its tokens
        self.aside: dict[str, Tensor] = {}
        self.parameters: Callable[[], dict[str, nn.Parameter]] = dict  # the masters
        model.watch = self

    def place(self, wrapped: Wrapped, device: torch.device) -> None:
        """Let masters and gradients be DTensors of whole parameters."""
        names = {id(p): n for n, p in wrapped.model.named_parameters()}
        mesh = mesh_of_parts(self.cluster, wrapped.plan.recipe.shards, device.type)
        for module in wrapped.by_name.values():
            for p in managed(cast(nn.Module, module)):
                dim = cut_dim(names[id(p.sharded_param)])
                part = Replicate() if dim is None else Shard(dim)
                place_in_whole(p, mesh, (part, Shard(0)))

    def guard(self, units: Iterable[str], entered: Callable[[], bool]) -> None:
        """Refuse, by ValueError, to compile the model or its units, and to run what has parameters
        unless a forward of the model was `entered`, which gathers them."""
        within = tuple(f"{name}." for name in units)

        def look(name: str, *_: Any) -> None:
            if torch.compiler.is_compiling():
                refuse(name)
            if name:
                self._check_again()
            if name and (self.seen != _backward() or (_backward() == -1 and not entered())):
                raise ValueError(
                    f"tp={self.tp}: the model's {name} was called by itself, where it has a part "
                    "of its parameters alone: call the model"
                )

        @torch.compiler.disable  # so that the error is the user's, not the compiler's
        def refuse(name: str) -> None:
            raise ValueError(
                f"tp={self.tp} is not built for torch.compile, here of {name or 'the model'}: "
                "leave it out"
            )

        for name, module in self.model.named_modules():
            if not name.startswith(within) and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(partial(look, name), prepend=True)

    def see(self, tokens: Tensor, given: Mapping[str, Any]) -> None:
        """Look at a forward's tokens and its other arguments. ValueError where parts cannot share
        the tokens, where one is no class, or where parts have different arguments: the last on all
        of them. On a GPU the host waits for that in the first forward of training and of evaluation
        alone."""
        self._compare({"tokens": tokens, **given}, tokens.device)
        self.tokens, shape = tokens.numel(), tuple(tokens.shape)
        if len(shape) != 2 or not self.tokens:
            raise ValueError(f"tokens of shape {shape}: use [batch, length], at least one token")
        if self.tokens % self.tp:
            raise ValueError(
                f"tp={self.tp} does not divide the {self.tokens} tokens of a micro-batch of "
                f"{shape}: pad sequences to a multiple"
            )
        self.check("tokens", tokens)
        self.seen = _backward()

    def check(self, kind: str, values: Tensor, ignored: int | None = None) -> None:
        """Look for tokens or labels that are neither a class nor `ignored`."""
        if values.numel() != self.tokens:
            raise ValueError(f"{values.numel()} {kind} of {self.tokens} tokens: give one for each")
        known = (values >= 0) & (values < self.classes)
        known = (known if ignored is None else known | (values == ignored)).all()
        if values.is_cuda:  # as torch's embedding: the host does not wait
            torch._assert_async(known)
        elif not known:
            besides = "" if ignored is None else f", and {ignored} where there is none"
            raise ValueError(
                f"{kind} from {int(values.min())} to {int(values.max())} with a vocabulary of "
                f"{self.classes}: use 0 to {self.classes - 1}{besides}"
            )

    def look_back(self, grad: Tensor) -> None:
        """Compare the gradient of a loss between parts, of each of which the rest of backward makes
        a term. ValueError as in `see`."""
        few = grad if grad.ndim == 2 else torch.stack(grad.aminmax(dim=-1))  # of whole logits
        self._compare({"gradients of the loss": few}, grad.device)

    def _compare(self, given: Mapping[str, Any], device: torch.device) -> None:
        """ValueError where parts have different values."""
        same, names = self._same(given, device), (str(self.model.training), *given)
        why = (
            f"tp={self.tp}: ranks of one tensor-parallel group have different {{}}: give them the "
            "same loss of the same batch, number Sharded.reader of Sharded.readers (the data "
            "loaders of Trainer and accelerate cannot)"
        )
        if device.type == "cuda" and names in self.compared:
            torch._assert_async(same, why.format("inputs" if len(given) > 1 else names[-1]))
        elif not same:
            differ = [n for n, one in given.items() if not self._same({n: one}, device)]
            raise ValueError(why.format(" and ".join(differ)))
        self.compared.add(names)

    @torch.no_grad()
    def _same(self, given: Mapping[str, Any], device: torch.device) -> Tensor:
        """Compare arguments between parts by the bits of tensors, added up, and all else."""
        leaves, tree = tree_flatten(dict(given))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if unknown := [x for x in leaves if not isinstance(x, _PLAIN)]:
            raise ValueError(
                f"tp={self.tp}: the forward was given a {type(unknown[0]).__name__}, which ranks "
                "cannot compare: use tensors and numbers"
            )
        others = [tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]
        number = torch.full((), crc32(repr((tree, others)).encode()), device=device)
        with self.uncounted():
            (every,) = self.raw("inputs", [torch.stack((number, mark_all(tensors, device)))])
        return (every == every[0]).all()

    def gather(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        self._follow_backward(wire)
        return super().gather(wire, place, xs)

    def scatter(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        self._follow_backward(wire)
        return super().scatter(wire, place, xs)

    def _follow_backward(self, wire: Wire) -> None:
        """Begin a backward at its first exchange, which may be that of a forward computed again."""
        if wire == ACTS_FORWARD:
            self._check_again()
        now = _backward()
        if now not in (-1, self.running):
            self.running = now
            self._begin()

    def _check_again(self) -> None:
        """ValueError where layers alone are computed again, whose tokens may be those of an earlier
        forward."""
        if _backward() not in (-1, self.seen):
            raise ValueError(
                f"tp={self.tp} is not built for activation checkpointing of layers: checkpoint "
                "self_attn and mlp in them, or the whole model, or leave it out"
            )

    def _begin(self) -> None:
        """Prepare a backward, before any gradient is reduced."""
        self.plain = False  # a forward without gradients may have come between
        own = self.parameters()
        self.aside = {n: g for n in self.shared if (g := own[n].grad) is not None}
        for name in self.aside:
            own[name].grad = None
        queue: Any = Variable._execution_engine
        queue.queue_callback(lambda: queue.queue_callback(self._end))  # after FSDP2's own

    @torch.no_grad()
    def _end(self) -> None:
        self.running, self.backwards = -1, self.backwards + 1
        own = self.parameters()
        grads = {n: local(g) for n in self.shared if (g := own[n].grad) is not None}
        if grads:
            self.add_shared(grads)
        for name, before in self.aside.items():
            if name in grads:
                grads[name] += local(before)
            else:
                own[name].grad = before
        self.aside = {}

    def in_whole(self, name: str, p: Tensor) -> tuple[Tensor, int]:
        """Return this rank's rows of a whole parameter, in fp32 and 0 where other parts have
        theirs, and the first one's number."""
        own, dim, shards = local(p).float(), cut_dim(name), self.plan.recipe.shards
        height = p.shape[0] // self.tp if dim == ROWS else p.shape[0]
        first, _ = own_rows((height,), shards, self.reader % shards)
        if dim is None:
            return own if self.part == 0 else own[:0], first
        if dim == ROWS:
            return own, self.part * height + first
        rows, left = own.new_zeros(len(own), p.shape[1]), self.part * own.shape[1]
        rows[:, left : left + own.shape[1]] = own
        return rows, first

    def enter(self, phase: int) -> None:
        """Begin a forward, in a phase."""
        self.seen = None
        self.follow(self.plans[phase].parts)


class Regions:
    """Finds a rank's state in the whole model's, with tensor parts or stages. own: names of the
    rank's parameters. names: those of the whole model's."""

    def __init__(
        self, cluster: ClusterConfig, plan: Plan, own: Container[str], parts: OwnPart | None
    ) -> None:
        self.tp, self.part = cluster.tp, cluster.place(dist.get_rank())["tp"]
        self.reader, self.shards, self.parts = reader_of(cluster), plan.recipe.shards, parts
        self.staged, self.own = cluster.pp > 1, own
        self.names = {p.name for unit in plan.units for p in unit.unit.parameters}

    def to_save(self, state: State) -> State:
        """Return what this rank writes of its cell's state: rows of whole tensors."""
        with self.parts.uncounted() if self.parts is not None else nullcontext():
            return map_state(state, self._saved)

    def to_read(self, state: State) -> State:
        """Return the rows into which whole tensors are read."""
        return map_state(state, self._region)

    def of_whole(self, state: State) -> State:
        """Return this rank's share of the whole model's state."""
        return stage_state(part_state(state, self.tp, self.part), self.own)

    def _region(self, name: str, tensor: Tensor) -> Any:
        writes = self.reader < self.shards
        if not isinstance(tensor, DTensor):
            writes = self.reader == self.part == 0
            return Rows((), 0, tensor.view(1), writes=writes) if self.staged else tensor
        shape, own = tuple(tensor.shape), local(tensor)
        first, _ = own_rows(shape, self.shards, self.reader % self.shards)
        dim = cut_dim(name) if self.tp > 1 else None
        if dim is None:
            return Rows(shape, first, own, writes=writes and self.part == 0)
        whole = tuple(n * self.tp if i == dim else n for i, n in enumerate(shape))
        if dim == ROWS:
            return Rows(whole, self.part * shape[0] + first, own, writes=writes)
        left = self.part * shape[1]
        return Rows(whole, first, own, slice(left, left + shape[1]), writes)

    def _saved(self, name: str, tensor: Tensor) -> Any:
        """Return whole rows, as files hold them: of a matrix cut by columns parts gather all rows,
        and each writes some."""
        region = self._region(name, tensor)
        if not isinstance(region, Rows) or region.columns is None or not region.numel():
            return region
        assert self.parts is not None
        (every,) = self.parts.raw(f"{name}, to be saved", [region.tensor.contiguous()])
        rows = every.transpose(0, 1).flatten(1, 2)
        each = -(-len(rows) // self.tp)
        low, high = (min(len(rows), each * n) for n in (self.part, self.part + 1))
        own = rows[low:high].contiguous()
        return Rows(region.shape, region.first + low, own, writes=region.writes)
