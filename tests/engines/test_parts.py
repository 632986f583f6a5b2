"""Tensor parts in the virtual engine: gradients, bytes, equality of what parts share, states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zpp_lab.codecs import BlockCodec
from zpp_lab.codecs.planes import joined, split
from zpp_lab.collectives import acts
from zpp_lab.collectives.acts import Parts
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.recipe import SHARDED
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, TP_RAW
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.build import build_engine, check_engine, plan_of
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model, build_parts
from zpp_lab.models.cut import merged
from zpp_lab.models.llama import Rope
from zpp_lab.models.loss import IGNORED

VOCAB, BATCH, LENGTH = 256, 2, 16
MODEL = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab_size": VOCAB}
ACTS8 = {"acts": {"bits": 8, "block_size": 32}}
MIXED = {
    "acts_forward": {"bits": 4, "block_size": 32, "rounding": "stochastic"},
    "acts_backward": {"codec": "normal", "bits": 4, "block_size": 32, "hadamard": 32},
    "weights": {"bits": 8, "block_size": 32, "rounding": "stochastic"},
    "grads": {"bits": 8, "block_size": 32},
    "exempt": {"max_ndim": 0},  # norms, which all parts have, are quantized too
}


def configured(shape: tuple[int, int, int], recipe: dict[str, Any], **more: Any) -> Config:
    nodes, gpus, tp = shape
    values: dict[str, Any] = {
        "recipe": recipe,
        "cluster": {"nodes": nodes, "gpus_per_node": gpus, "tp": tp} | more.pop("cluster", {}),
        "model": MODEL | more.pop("model", {}),
        "data": {"seq_len": LENGTH, "tokenizer": "bytes"},
        "engine": {"device": "cpu"} | more.pop("engine", {}),
        "train": {"clip": 0.5, "steps": 100, "batch_size": BATCH, "micro_steps": 2} | more,
    }
    return load(Config, values)


def made(shape: tuple[int, int, int], recipe: dict[str, Any], **more: Any) -> VirtualEngine:
    engine = build_engine(configured(shape, recipe, **more), VOCAB, torch.device("cpu"))
    assert isinstance(engine, VirtualEngine)
    return engine


def batch(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + step * 100 + rank * 10 + micro)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    engine: VirtualEngine, first: int, last: int, rate: float = 1e-2
) -> list[tuple[float, float]]:
    every = [engine.step(s, rate, partial(batch, s), False) for s in range(first, last)]
    return [(r.loss, r.grad_norm) for r in every]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(same(a, b) if isinstance(a, dict) else torch.equal(a, b) for a, b in pairs)


def shared_alike(engine: VirtualEngine) -> bool:
    """Whether all parts have the same bits of what none of them has alone."""
    first, *others = engine.cells
    return all(
        torch.equal(first.master[name].view(torch.int32), cell.master[name].view(torch.int32))
        for cell in others
        for name in engine.shared
    )


# ---------------------------------------------------------------------- gradients


class Exact:
    """Exchanges of all parts in their own dtype."""

    def gather(self, wire: Any, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(xs)) for _ in xs]

    def scatter(self, wire: Any, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.stack(list(xs)).sum(0).clone().chunk(len(xs)))

    def raw(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(xs)) for _ in xs]


def rotated(self: Rope, x: Tensor, cache: None = None) -> Tensor:
    """In fp64: in fp32 a rotation's last bit depends on how many heads there are."""
    table = torch.view_as_complex(self.table(x.shape[1], x.device).double())
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table).flatten(-2)


def check_gradients(
    whole: Any, parts: list[Any], tokens: Tensor, targets: Tensor, logits: Tensor
) -> None:
    """Loss and gradients of joined parts are those of the whole model, of these logits."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    made = parts[0](tokens, targets)
    made.backward()
    assert abs(float(made.detach() - loss.detach())) < 1e-12
    every = [dict(part.named_parameters()) for part in parts]
    for name, p in whole.named_parameters():
        grads = [own[name].grad for own in every]
        cut = grads[0].shape != p.shape
        found = merged(name, grads) if cut else torch.stack(grads).sum(0)
        assert float((found - p.grad).abs().max()) < 1e-12, name
        assert float(found.abs().max()) > 1e-6, name


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "tied_head": True}], ids=str)
def test_raw_parts_have_the_whole_models_gradients(
    tp: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rope, "rotate", rotated)
    config = ModelConfig(**(MODEL | more))  # type: ignore[arg-type]
    whole = build_model(config, VOCAB, seed=3).double()
    parts = [part.double() for part in build_parts(config, VOCAB, tp, "cpu", seed=3)]
    parts[0].join(parts, Exact())
    tokens, targets = batch(0, 0, 0)
    targets = targets.masked_fill(torch.arange(LENGTH) == 3, IGNORED)
    check_gradients(whole, parts, tokens, targets, whole(tokens))


def test_raw_parts_train_and_are_evaluated_as_the_whole_model() -> None:
    one, two = made((1, 2, 1), {}), made((1, 4, 2), {})
    # AdamW's first updates are near the signs of gradients, however small: a low rate
    for a, b in zip(train(one, 0, 3, 1e-4), train(two, 0, 3, 1e-4), strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    held = [batch(99, i, 0) for i in range(3)]
    for wire in (True, False):
        assert two.evaluate(3, held, wire) == pytest.approx(one.evaluate(3, held, wire), rel=1e-5)
    scores = [engine.token_scores(3, held, True)[1] for engine in (one, two)]
    assert torch.equal(*scores)  # which targets are predicted


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize(("shape", "bits"), [((1, 2, 2), 4), ((2, 4, 2), 8), ((1, 8, 4), None)])
def test_a_steps_bytes_are_the_closed_forms(shape: tuple[int, int, int], bits: int | None) -> None:
    recipe = {"acts": {"bits": bits, "block_size": 32}} if bits else {}
    engine = made(shape, recipe, param_dtype="bf16")
    readers, tp, micros = shape[0] * shape[1] // shape[2], shape[2], 2
    found = engine.step(0, 1e-2, partial(batch, 0), False).bytes
    tokens, layers = BATCH * LENGTH, 2
    row = tokens * MODEL["dim"] // tp
    codec = BlockCodec(bits, 32) if bits else None
    each = codec.nbytes(row) if codec else 2 * row
    pairs = tp * (tp - 1) * readers
    places = 4 * layers + 2  # two gathers and two scatters a block, the embedding's and the head's
    for wire in (ACTS_FORWARD, ACTS_BACKWARD):
        assert found[wire] == (pairs * each * places * micros, 0)
    names = [p for u in engine.plan.units for p in u.unit.parameters if p.parts == 1]
    shared = sum(p.shard_numel for p in names)
    assert found[TP_RAW] == (pairs * 4 * (3 * tokens * micros + shared), 0)
    assert found == engine.plan.step_bytes() == plan_of(engine.config).step_bytes()
    share = engine.plan.quantized_share()
    assert share[ACTS_FORWARD] == float(bits is not None)
    assert share[TP_RAW] == 0.0


def test_weights_and_gradients_are_those_of_a_cell_for_every_part() -> None:
    """But for parameters that all parts have."""
    one = plan_of(configured((2, 2, 1), {})).step_bytes()
    two = plan_of(configured((2, 4, 2), {})).step_bytes()
    for wire in ("weights_forward", "weights_backward", "grads_intra", "grads_inter"):
        cut, whole = sum(two[wire]), sum(one[wire])  # type: ignore[index]
        assert whole < cut < 1.02 * whole


# ---------------------------------------------------------------------- what parts share


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_parts_share_every_byte_after_many_quantized_steps(steps: int) -> None:
    engine = made((1, 4, 2), MIXED, param_dtype="bf16", micro_steps=1)
    train(engine, 0, steps)
    assert shared_alike(engine)


def unsummed(self: VirtualEngine, grads: list[Any]) -> None:
    assert self.parts is not None
    self.ledger.add(TP_RAW, self.parts.plan.traffic(acts.FP32 * self.parts.plan.shared))


def test_without_the_sum_of_shared_gradients_parts_come_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualEngine, "_add_shared", unsummed)
    engine = made((1, 4, 2), ACTS8)
    train(engine, 0, 2)
    assert not shared_alike(engine)


def test_the_norm_counts_shared_parameters_once() -> None:
    one, two, wrong = made((1, 2, 1), {}), made((1, 4, 2), {}), made((1, 4, 2), {})
    wrong.shared = frozenset()  # summed no more, and counted by every part
    found = [train(engine, 0, 1)[0][1] for engine in (one, two, wrong)]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] != pytest.approx(found[0], rel=1e-6)


class Undecoded(Parts):
    """Each part keeps its own slice uncompressed, which no other part then has."""

    def gather(self, wire: Any, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
        outs = super().gather(wire, place, xs)
        for out, part, x in zip(outs, self.own, xs, strict=True):
            out[part * len(x) : (part + 1) * len(x)] = x
        return outs


@pytest.mark.parametrize("kind", [Parts, Undecoded])
def test_all_parts_decode_the_same_tokens(kind: type[Parts]) -> None:
    engine = made((1, 2, 2), ACTS8)
    assert engine.parts is not None
    parts = kind(engine.parts.plan, engine.clock, engine.ledger)
    xs = [torch.randn(8, 32) for _ in range(2)]
    one, two = parts.gather(ACTS_FORWARD, "head", xs)
    assert torch.equal(one, two) == (kind is Parts)


def test_a_scatter_sums_decoded_rows_in_the_parts_order() -> None:
    engine = made((1, 4, 4), ACTS8)
    assert engine.parts is not None
    xs = [torch.randn(16, 32) for _ in range(4)]
    found = engine.parts.scatter(ACTS_BACKWARD, "head", xs)
    codec = BlockCodec(8, 32)
    for part, out in enumerate(found):
        total = torch.zeros(1, 4 * 32)
        for x in xs:
            row = x[4 * part : 4 * part + 4].reshape(1, -1)
            payload = torch.empty(1, codec.nbytes(row.numel()), dtype=torch.uint8)
            codec.encode(row, None, payload)
            total += codec.decode(payload, row.numel())
        assert torch.equal(out.view(1, -1), total)


def test_telemetry_shows_the_error_of_activations() -> None:
    errors = []
    for bits in (8, 4):
        engine = made((1, 4, 2), {"acts": {"bits": bits, "block_size": 32}})
        found = engine.step(0, 1e-2, partial(batch, 0), True).telemetry
        assert found is not None
        assert set(found) == {ACTS_FORWARD, ACTS_BACKWARD}
        errors.append(found)
    for wire in (ACTS_FORWARD, ACTS_BACKWARD):
        coarse, fine = errors[1][wire]["mlp"], errors[0][wire]["mlp"]
        assert coarse["nmse"] > 20 * fine["nmse"] > 0


def test_a_gradient_that_is_not_finite_is_named_with_its_process() -> None:
    engine = made((1, 4, 2), ACTS8)
    name = "layers.0.mlp.w_down.weight"
    engine.cells[1].weights[name].register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match=rf"{name} on rank 1"):
        train(engine, 0, 1)


# ---------------------------------------------------------------------- states


def test_a_run_goes_on_from_its_state_and_any_number_of_parts_reads_it() -> None:
    engine = made((1, 4, 2), MIXED, param_dtype="bf16")
    train(engine, 0, 2)
    state = {k: clone(v) for k, v in engine.state_dict().items()}
    again = made((1, 4, 2), MIXED, param_dtype="bf16")
    again.load_state_dict(state)
    assert train(again, 2, 4) == train(engine, 2, 4)
    assert same(again.state_dict(), engine.state_dict())
    for shape in ((1, 2, 1), (2, 4, 4)):
        other = made(shape, {})
        other.load_state_dict(state)
        assert same(other.state_dict(), state)


def test_parts_read_masters_of_two_planes() -> None:
    start, two = made((1, 2, 1), {}).state_dict(), made((1, 4, 2), {})
    planes = {name: split(value) for name, value in start["weights"].items()}
    high, low = ({name: pair[i] for name, pair in planes.items()} for i in (0, 1))
    two.load_state_dict(start | {"weights": high, "low": low})
    wanted = {name: joined(*pair) for name, pair in planes.items()}
    assert any(not torch.equal(high[name].float(), wanted[name]) for name in wanted)
    assert same(two.state_dict()["weights"], wanted)


def clone(value: Any) -> Any:
    return {k: clone(v) for k, v in value.items()} if isinstance(value, dict) else value.clone()


def test_differences_of_parts_are_kept_and_saved() -> None:
    recipe = {
        "sharding": {"weights": "node", "update": "differences"},
        "weights_update": {"bits": 4, "block_size": 32},
        **ACTS8,
    }
    engine, again = (made((2, 4, 2), recipe, param_dtype="bf16") for _ in range(2))
    train(engine, 0, 2)
    again.load_state_dict({k: clone(v) for k, v in engine.state_dict().items()})
    assert train(again, 2, 4) == train(engine, 2, 4)
    assert same(again.state_dict(), engine.state_dict())


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "recipe", "more", "name"),
    [
        ((1, 2, 1), ACTS8, {}, "recipe.acts"),
        ((1, 2, 2), {"acts": {"codec": "topk", "keep": 4}}, {}, "topk"),
        ((1, 2, 2), {"acts": {"bits": 8, "memory": {"kind": "residual"}}}, {}, "memory.kind"),
        ((1, 2, 2), {"rules": [{"wires": ["acts_forward"], "set": {"bits": 4}}]}, {}, "rules"),
        ((1, 4, 2), {"grads": {"bits": 8, "memory": {"kind": "residual"}}}, {}, "memory.kind"),
        ((2, 4, 2), {"sharding": dict.fromkeys(SHARDED, "none")}, {}, "sharding.optimizer"),
        ((1, 2, 2), {}, {"engine": {"name": "deepspeed"}}, "engine=deepspeed"),
        (
            (1, 2, 2),
            {},
            {
                "engine": {"compile": True},
                "model": {"name": "hf", "options": {"model_type": "llama"}},
            },
            "engine.compile",
        ),
        ((1, 2, 2), {}, {"engine": {"name": "fsdp", "offload": True}}, "engine.offload"),
        ((1, 2, 2), {}, {"optimizer_state": "8bit"}, "train.optimizer_state"),
        (
            (1, 2, 2),
            {},
            {"optimizer_state": "bf16", "param_dtype": "bf16", "masters": "split"},
            "train.masters",
        ),
        ((1, 2, 2), {}, {"model": {"loss_chunk": 8}}, "model.loss_chunk"),
        ((1, 2, 2), {}, {"model": {"checkpoint_activations": True}}, "checkpoint_activations"),
        ((1, 2, 2), {}, {"model": {"kv_heads": 1}}, "model.kv_heads"),
        ((1, 2, 2), {}, {"model": {"vocab_size": 257}}, "model.vocab_size"),
    ],
    ids=str,
)
def test_what_parts_do_not_have_is_refused_by_name(
    shape: tuple[int, int, int], recipe: dict[str, Any], more: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        made(shape, recipe, **more)


def test_acts_alone_count_as_quantized_on_one_reader() -> None:
    """A cell of one rank has no wires, but its parts have."""
    config = configured((1, 2, 2), ACTS8)
    check_engine(config)
    with pytest.raises(ValueError, match="rank"):
        check_engine(configured((1, 2, 2), {"weights": {"bits": 8}}))
