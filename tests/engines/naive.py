"""A deliberately naive sharded run: every rank has its shards, payloads, model and optimizer.

Written from the numerics contract, not from the virtual engine: no streaming, no layout
operators, no shared sums. It keeps the full payload of every rank for every peer.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from tests.codecs.test_numerics import by_halves
from tests.engines.uneven import batch, build_uneven
from zpp_lab.codecs import (
    BlockCodec,
    Codec,
    Noise,
    RawCodec,
    SegmentNoise,
    encode,
    noise_key,
    parameter_id,
)
from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.optim.build import adamw


def cut(whole: Tensor, world: int) -> list[Tensor]:
    """FSDP2's shards along dimension 0: W tensors of equal size, flat, zero-padded."""
    rows = math.ceil(whole.shape[0] / world)
    shards = []
    for rank in range(world):
        mine = whole[rank * rows : (rank + 1) * rows]
        full = whole.new_zeros(rows, *whole.shape[1:])
        full[: mine.shape[0]] = mine
        shards.append(full.flatten())
    return shards


def join(shards: list[Tensor], shape: torch.Size) -> Tensor:
    return torch.cat(shards)[: shape.numel()].view(shape)


def stored(row: Tensor, store: str) -> Tensor:
    if store == "8bit":
        eight = BlockCodec(bits=8, block_size=256)
        return eight.decode(encode(eight, row[None]), row.numel())[0]
    return row.bfloat16().float() if store == "bf16" else row


class NaiveRun:
    def __init__(self, config: Config) -> None:
        self.config, self.cluster = config, config.cluster
        self.world, self.local = config.cluster.world, config.cluster.gpus_per_node
        self.dtype = DTYPES[config.train.param_dtype]
        self.reduce_dtype = DTYPES[config.train.reduce_dtype]
        model = build_uneven()
        self.recipe: Recipe = build_plan(model, config).recipe
        self.shapes = {n: p.shape for n, p in model.named_parameters()}
        self.root = [n for n in self.shapes if not n.startswith("layers.")]
        self.shards: list[dict[str, nn.Parameter]] = []
        for rank in range(self.world):
            own = {}
            for name, p in model.named_parameters():
                rows = math.ceil(p.shape[0] / self.world)
                mine = p.detach()[rank * rows : (rank + 1) * rows].clone()
                own[name] = nn.Parameter(mine, requires_grad=p.requires_grad)
            self.shards.append(own)
        self.models = [copy.deepcopy(model) for _ in range(self.world)]
        for m in self.models:
            for p in m.parameters():
                p.data = p.data.to(self.dtype)
        self.optimizers = [adamw(own, config.train) for own in self.shards]
        # what a rank remembers of its row for a shard, as it is stored, by wire and parameter
        self.remembered: dict[tuple[str, str, int, int], Tensor] = {}
        self.order = list(range(self.world))
        if config.recipe.order == "reversed":
            self.order.reverse()

    def parameter(self, name: str) -> Parameter:
        return Parameter(name, tuple(self.shapes[name]), self.world)

    def noise(self, step: int, micro: int, wire: str, name: str, rank: int, *rows: int):
        key = noise_key(self.config.seed, step, micro, wire)  # type: ignore[arg-type]
        return SegmentNoise(Noise(key, (rank,) * len(rows), rows), parameter_id(name))

    def gather(self, step: int, wire: str) -> dict[str, Tensor]:
        """What every rank decodes: one payload row from each rank."""
        out = {}
        for name, shape in self.shapes.items():
            codec = self.recipe.codec(wire, self.parameter(name))  # type: ignore[arg-type]
            numel = self.parameter(name).shard_numel
            decoded = []
            for rank in range(self.world):
                mine = self.shards[rank][name].detach().to(self.dtype).flatten()
                padded = torch.cat((mine, mine.new_zeros(numel - mine.numel())))
                row = encode(codec, padded[None], self.noise(step, 0, wire, name, rank, rank))
                decoded.append(codec.decode(row, numel)[0].to(self.dtype))
            out[name] = join(decoded, shape)
        return out

    def encoded(self, codec: Codec, x: Tensor, moment, rank: int, to, **how: bool) -> Tensor:
        """The payload of a rank's rows for the shards `to`, with what it remembers of them."""
        _, _, wire, name = moment
        noise, memory = self.noise(*moment, rank, *to), self.recipe.wire(wire).memory
        if not memory.on or isinstance(codec, RawCodec):
            return encode(codec, x, noise, **how)
        keys = [(wire, name, rank, row) for row in to]
        m = torch.stack([self.remembered.get(k, torch.zeros(x.shape[1])) for k in keys])
        y = x.float() + m
        payload = encode(codec, y, noise, **how)
        lost = y - codec.decode_sum(payload[None], self.parameter(name).shard_numel, **how)
        average = memory.average or 0.0
        lost = lost * torch.tensor((1.0 - average) * (memory.decay or 1.0))
        if average:
            lost = m * torch.tensor(average) + lost
        for key, row in zip(keys, lost, strict=True):
            self.remembered[key] = stored(row, memory.store or "bf16")
        return payload

    def step(self, step: int, lr: float) -> tuple[float, float]:
        """The step's loss and the norm of its gradient."""
        for wire in self.recipe.hops:
            every = self.recipe.wire(wire).memory.reset_every
            if every and step % every == 0:
                self.remembered = {k: m for k, m in self.remembered.items() if k[0] != wire}
        forward = self.gather(step, "weights_forward")
        backward = dict(forward)
        if self.config.recipe.stage == 3 and not self.config.recipe.secondary:
            again = self.gather(step, "weights_backward")
            backward |= {n: t for n, t in again.items() if n not in self.root}
        micros = self.config.train.micro_steps
        last = self.config.train.accumulate == "last" or self.config.recipe.stage == 1
        losses: list[float] = []  # micro-step by micro-step, then by rank
        grads: list[list[dict[str, Tensor]]] = []  # [micro][rank]
        for micro in range(micros):
            grads.append([])
            for rank, model in enumerate(self.models):
                loss = self.backward(model, forward, backward, batch(step, rank, micro), micros)
                losses.append(loss)
                grads[-1].append(
                    {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                )
        if last and micros > 1:
            grads = [[self.added([g[rank] for g in grads]) for rank in range(self.world)]]
        mine: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        for i, per_rank in enumerate(grads):
            micro = micros - 1 if last else i
            for name in per_rank[0]:
                for rank, part in enumerate(
                    self.reduce(step, micro, name, [g[name] for g in per_rank])
                ):
                    mine[rank][name] = mine[rank][name] + part if name in mine[rank] else part
        return by_halves(losses) / len(losses), self.update(mine, lr)

    def added(self, grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        total = {n: g.to(self.reduce_dtype) for n, g in grads[0].items()}
        for more in grads[1:]:
            total = {n: t + more[n] for n, t in total.items()}
        return total

    def backward(self, model, forward, backward, data, micros) -> float:
        weights = dict(model.named_parameters())
        model.zero_grad(set_to_none=True)
        for name, p in weights.items():
            p.data.copy_(forward[name])
        loss = model(*data)
        for name, p in weights.items():
            p.data.copy_(backward[name])
        (loss / micros).backward()
        return float(loss.detach())

    def reduce(self, step: int, micro: int, name: str, grads: list[Tensor]) -> list[Tensor]:
        """Each rank's shard of the mean gradient, fp32, without padding."""
        p = self.parameter(name)
        rows = [torch.stack(cut(g, self.world)) for g in grads]  # [source], of [destination, n]
        hops = self.recipe.hops
        codecs = [self.recipe.codec(wire, p) for wire in hops]
        if len(hops) == 1:
            moment, to = (step, micro, hops[0], name), range(self.world)
            payloads = [self.encoded(codecs[0], rows[s], moment, s, to) for s in self.order]
            total = codecs[0].decode_sum(torch.stack(payloads), p.shard_numel)
        else:
            total = self.two_hops(step, micro, name, rows, codecs)
        mean = total.to(self.reduce_dtype).div(self.world).float()
        lasts = [max(p.numel - rank * p.shard_numel, 0) for rank in range(self.world)]
        return [row[:last] for row, last in zip(mean, lasts, strict=True)]

    def two_hops(self, step, micro, name, rows, codecs: list[Codec]) -> Tensor:
        n = self.parameter(name).shard_numel
        first, second = codecs
        kept = first.rotation is not None and first.rotation == second.rotation
        how = {"rotated": True} if kept else {}
        arrived = []
        nodes = sorted(
            {s // self.local for s in self.order},
            key=lambda k: (
                self.order.index(k * self.local) if self.config.recipe.order == "rank" else -k
            ),
        )
        for node in nodes:
            members = [s for s in self.order if s // self.local == node]
            moment, to = (step, micro, "grads_intra", name), range(self.world)
            payloads = [self.encoded(first, rows[s], moment, s, to) for s in members]
            part = first.decode_sum(torch.stack(payloads), n, **how)
            out = torch.empty(self.world, second.nbytes(n), dtype=torch.uint8)
            for local in range(self.local):
                sender, to = node * self.local + local, [*range(local, self.world, self.local)]
                moment = (step, micro, "grads_inter", name)
                out[to] = self.encoded(second, part[to], moment, sender, to, **how)
            arrived.append(out)
        return second.decode_sum(torch.stack(arrived), n)

    def update(self, mine: list[dict[str, Tensor]], lr: float) -> float:
        from zpp_lab.codecs.numerics import fold_sum

        total = torch.zeros((), dtype=torch.float64)
        for rank in range(self.world):
            part = torch.zeros((), dtype=torch.float64)
            for name in [
                n
                for u in build_plan(self.models[0], self.config).units
                for n in (p.name for p in u.unit.parameters)
            ]:
                if name not in mine[rank]:
                    continue
                g = mine[rank][name]
                full = torch.cat((g, g.new_zeros(self.parameter(name).shard_numel - g.numel())))
                part = part + fold_sum(full.double() ** 2)
            total = total + part
        norm = total.sqrt()
        factor = (self.config.train.clip / (norm + 1e-6)).clamp(max=1.0).float()
        for rank, own in enumerate(self.shards):
            for name, p in own.items():
                if name in mine[rank]:
                    g = mine[rank][name]
                    p.grad = (g * factor if self.config.train.clip else g).view(p.shape)
            for group in self.optimizers[rank].param_groups:
                group["lr"] = lr
            self.optimizers[rank].step()
            self.optimizers[rank].zero_grad(set_to_none=True)
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: torch.cat([own[name].detach() for own in self.shards]) for name in self.shapes
        }
