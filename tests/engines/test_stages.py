"""Stages of a model in the virtual engine: bytes, noise, norms, states, refusals."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest

from tests.engines.test_parts import batch, clone, configured, made, same, train
from zpp_lab.codecs import BlockCodec
from zpp_lab.collectives.pipe import passes
from zpp_lab.config.recipe import SHARDED
from zpp_lab.config.wires import ACTS_PIPE, WIRES
from zpp_lab.engines.build import check_engine, plan_of
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.train.memory.buffers import Estimate
from zpp_lab.train.memory.estimate import estimate, passes_under_way, payload_bytes

PIPE8 = {"stage": 2, "acts_pipe": {"bits": 8, "block_size": 32}}
MIXED = {
    "stage": 2,
    "acts_pipe": {"bits": 4, "block_size": 32, "rounding": "stochastic"},
    "grads": {"bits": 8, "block_size": 32, "rounding": "stochastic"},
}
Shape = tuple[int, int, int, int]  # nodes, GPUs of a node, tensor parts, stages
BATCH, LENGTH, DIM = 2, 16, 32


def staged(shape: Shape, recipe: dict[str, Any], **more: Any) -> VirtualEngine:
    *parts, pp = shape
    model = {"layers": 4} | more.pop("model", {})
    return made(tuple(parts), recipe, cluster={"pp": pp}, model=model, **more)  # type: ignore[arg-type]


def test_raw_stages_train_and_are_evaluated_as_the_whole_model() -> None:
    """To the bit, but for the norm, whose sums have another order."""
    one, two = (
        staged((1, 2, 1, 1), {"stage": 2}, clip=0.0),
        staged((1, 4, 1, 2), {"stage": 2}, clip=0.0),
    )
    for a, b in zip(train(one, 0, 3), train(two, 0, 3), strict=True):
        assert b[0] == a[0]
        assert b[1] == pytest.approx(a[1], rel=1e-12)
    assert same(one.state_dict(), two.state_dict())
    held = [batch(99, i, 0) for i in range(3)]
    assert one.evaluate(3, held, True) == two.evaluate(3, held, True)


@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 2, 1, 2), (2, 4, 2, 2), (4, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("bits", [4, None])
def test_a_steps_bytes_are_the_closed_forms(shape: Shape, bits: int | None) -> None:
    recipe = {"stage": 2} | ({"acts_pipe": {"bits": bits, "block_size": 32}} if bits else {})
    nodes, gpus, tp, pp = shape
    micros = max(2, pp)
    engine = staged(shape, recipe, param_dtype="bf16", micro_steps=micros)
    found = engine.step(0, 1e-2, partial(batch, 0), False).bytes
    row = BATCH * LENGTH * DIM // tp
    each = BlockCodec(bits, 32).nbytes(row) if bits else 2 * row
    readers = nodes * gpus // (tp * pp)
    total = each * tp * readers * 2 * (pp - 1) * micros
    assert found[ACTS_PIPE] == ((0, total) if nodes % pp == 0 else (total, 0))
    assert found == engine.plan.step_bytes() == plan_of(engine.config).step_bytes()
    assert engine.plan.quantized_share()[ACTS_PIPE] == float(bits is not None)


def test_interleaved_stages_cross_more_often() -> None:
    engine = staged((1, 2, 1, 2), PIPE8, engine={"schedule": "interleaved"})
    found = engine.step(0, 1e-2, partial(batch, 0), False).bytes[ACTS_PIPE]
    once = staged((1, 2, 1, 2), PIPE8).step(0, 1e-2, partial(batch, 0), False).bytes[ACTS_PIPE]
    assert found == once * 3


def test_weights_and_gradients_are_those_of_the_whole_model() -> None:
    one = plan_of(configured((2, 2, 1), {"stage": 2})).step_bytes()
    two = plan_of(configured((4, 2, 1), {"stage": 2}, cluster={"pp": 2})).step_bytes()
    for wire, spec in WIRES.items():
        if spec.carries != "activations":
            assert two.get(wire) == one.get(wire)


def test_crossings_have_noise_of_their_own_and_telemetry() -> None:
    engine = staged((1, 4, 1, 2), MIXED)
    found = engine.step(0, 1e-2, partial(batch, 0), True).telemetry
    assert found is not None
    other = staged((1, 4, 1, 2), PIPE8).step(0, 1e-2, partial(batch, 0), True).telemetry
    assert other is not None
    (coarse,), (fine,) = found[ACTS_PIPE].values(), other[ACTS_PIPE].values()
    assert coarse["nmse"] > 20 * fine["nmse"] > 0
    assert train(staged((1, 4, 1, 2), MIXED), 0, 3) == train(staged((1, 4, 1, 2), MIXED), 0, 3)


def test_a_run_goes_on_from_its_state_and_any_number_of_stages_reads_it() -> None:
    first = staged((1, 8, 2, 2), MIXED, param_dtype="bf16")
    train(first, 0, 2)
    state = clone(first.state_dict())
    after = train(first, 2, 4)
    again = staged((1, 8, 2, 2), MIXED, param_dtype="bf16")
    again.load_state_dict(state)
    assert train(again, 2, 4) == after
    assert same(again.state_dict(), first.state_dict())
    for shape in ((1, 2, 1, 1), (1, 4, 2, 1), (1, 2, 1, 2), (4, 1, 1, 4)):
        other = staged(shape, {"stage": 2}, micro_steps=4)
        other.load_state_dict(state)
        assert same(other.state_dict(), state)


@pytest.mark.parametrize(
    ("recipe", "more", "said"),
    [
        ({}, {}, "recipe.stage=2"),
        ({"stage": 2, "sharding": dict.fromkeys(SHARDED, "none")}, {}, "sharding"),
        ({"stage": 2}, {"model": {"tied_head": True}}, "model.tied_head"),
        ({"stage": 2}, {"model": {"layers": 1}}, "model.layers"),
        ({"stage": 2}, {"engine": {"name": "deepspeed"}}, "engine=deepspeed"),
        ({"stage": 2}, {"engine": {"blocks_per_unit": 2}}, "engine.blocks_per_unit"),
        ({"stage": 2}, {"engine": {"schedule": "zbv"}}, "zero-bubble"),
        ({"stage": 2}, {"micro_steps": 1}, "train.micro_steps=1"),
        ({"stage": 2}, {"engine": {"schedule": "interleaved"}, "micro_steps": 5}, "micro_steps=5"),
        ({"stage": 2}, {"optimizer_state": "8bit"}, "train.optimizer_state"),
        ({"stage": 2}, {"engine": {"place": "host"}}, "engine.place"),
        ({"stage": 2}, {"clip_by": "unit", "micro_steps": 1}, "train.clip_by"),
        ({"stage": 2}, {"param_dtype": "bf16", "masters": "split"}, "train.masters"),
        ({"stage": 2, "acts_forward": {"bits": 8}}, {}, "recipe.acts_forward"),
    ],
)
def test_what_has_no_stages_is_named(
    recipe: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    model = {"layers": 4} | more.pop("model", {})
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        check_engine(configured((2, 2, 1), recipe, cluster={"pp": 2}, model=model, **more))


def test_settings_of_stages_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match=r"recipe\.acts_pipe"):
        configured((1, 4, 2), PIPE8)
    with pytest.raises(ValueError, match=r"engine\.schedule"):
        configured((1, 2, 1), {}, engine={"schedule": "gpipe"})


# ---------------------------------------------------------------------- memory


def gib(shape: Shape, kind: str, micros: int) -> Estimate:
    *parts, pp = shape
    more: dict[str, Any] = {"model": {"layers": 8, "dim": 256, "ffn": 512}, "cluster": {"pp": pp}}
    more |= {"engine": {"name": "fsdp"} | ({"schedule": kind} if pp > 1 else {})}
    config = configured(tuple(parts), {"stage": 2}, micro_steps=micros, **more)  # type: ignore[arg-type]
    return estimate(plan_of(config), config, 256)


def test_memory_is_that_of_a_stage_and_of_the_micro_steps_under_way() -> None:
    one, two = gib((1, 2, 1, 1), "1f1b", 8), gib((1, 4, 1, 2), "1f1b", 8)
    masters = [each.item("master weights, fp32").most for each in (one, two)]
    assert masters[1] == pytest.approx(masters[0] / 2, rel=0.05)
    other = "activations of other micro-steps"
    few, many = two.item(other).most, gib((1, 4, 1, 2), "gpipe", 8).item(other).most
    assert many == 7 * few == 7 * two.item("activations").nbytes["loss"]
    payloads = gib((1, 4, 1, 2), "1f1b", 16).item("payloads of stages").most
    assert payloads == 2 * two.item("payloads of stages").most > 0
    overlap = gib((1, 4, 1, 2), "1f1b_overlap", 16)
    assert overlap.item(other).most == 3 * few
    assert 0 < overlap.item("payloads of stages").most < payloads
    parts = gib((1, 4, 2, 2), "1f1b", 8)
    assert parts.item("master weights, fp32").most == pytest.approx(masters[1], rel=0.05)
    assert parts.item(other).most < two.item(other).most


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 8), (3, 3), (4, 16), (5, 9)])
def test_ticks_of_1f1b_overlap(stages: int, micros: int) -> None:
    """A pass comes two ticks after the one whose payload it needs, passes keep the micro-steps'
    order, and what waits for its backward is what memory is planned for."""
    made = configured(
        (1, stages, 1),
        {"stage": 2},
        micro_steps=micros,
        cluster={"pp": stages},
        model={"layers": stages},
        engine={"schedule": "1f1b_overlap"},
    )
    pipe, last = plan_of(made).pipe, stages - 1
    assert pipe is not None
    for stage in range(stages):
        ticks = range(micros + 4 * stages)
        every = [(tick, *due) for tick in ticks for due in passes(stages, stage, micros, tick)]
        when = {(which, micro): tick for tick, which, micro in every}
        there, back = ([when[w, m] for m in range(micros)] for w in ("forward", "backward"))
        assert there == list(range(2 * stage, micros + 2 * stage))
        assert back == [tick + 4 * (last - stage) for tick in there]
        assert len(every) == 2 * micros
        begun = accumulate(1 if which == "forward" else -1 for _, which, _ in every)
        assert max(begun) == passes_under_way(made, stages, stage)
        spans = [(f - 1, b) for f, b in zip(there, back, strict=True)] * (stage > 0)
        spans += [(f + 1, b) for f, b in zip(there, back, strict=True)] * (stage < last)
        spans += [(b - 1, b) for b in back] * (stage < last)
        spans += [(b + 1, b + 2) for b in back] * (stage > 0)
        held = max(sum(begin <= tick <= end for begin, end in spans) for tick in ticks)
        bound = payload_bytes(made, pipe, stage) // pipe.layout.nbytes
        assert held == bound or (held < bound and micros < 4 * last + 2)
