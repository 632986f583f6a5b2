"""Others' loops around `zpp_lab.shard` get what they would get from FSDP2, or an error that names
what to change."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests import loop_base
from tests.engines.fsdp_world import run_world
from tests.loop_jobs import (
    APART,
    BF16,
    CALLED,
    CASES,
    ENDS,
    FROZEN,
    INTEGERS,
    KEPT,
    KINDS,
    MICRO,
    ORDERS,
    RESUMED,
    STEPS,
    WAYS,
    Net,
    averaged,
    bf16,
    collected,
    converted,
    experts,
    forwards,
    frozen_alone,
    frozen_parts,
    inference,
    integers,
    optimizers,
    own_among_micro_steps,
    raised,
    resumed,
    swapped,
    two_forwards,
    unfrozen_within,
)
from tests.loop_world import ask, cluster_of
from tests.two_ranks import two_gpus, two_ranks
from zpp_lab.api import _own_dtype, shard
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.engines.units import check_dtypes, cut_units

JOBS: dict[Callable[..., Any], tuple[str, ...]] = {
    swapped: KEPT,
    averaged: ("amsp_node",),
    optimizers: ENDS,
    own_among_micro_steps: MICRO,
    forwards: CALLED,
    two_forwards: ("zeropp",),
    raised: ("zeropp", "loco"),
    inference: APART,
    experts: APART,
    frozen_parts: FROZEN,
    unfrozen_within: ("zeropp",),
    integers: INTEGERS,
    bf16: BF16,
    converted: APART,
    collected: ("zeropp",),
}


ALL = [(job, name) for job in JOBS for name in JOBS[job]] + [(resumed, name) for name in RESUMED]
# The recipes of jobs that are run with all of theirs by the slow tests alone.
FEWER: dict[Callable[..., Any], tuple[str, ...]] = {
    swapped: ("amsp_node", "sdp4bit"),
    optimizers: ("zero3", "loco"),
    own_among_micro_steps: ("loco",),
    forwards: ("amsp_node",),
    raised: ("loco",),
    inference: ("zeropp",),
    frozen_parts: ("zero3", "amsp_node"),
    integers: ("zeropp",),
    bf16: ("zeropp",),
    converted: ("zeropp",),
    resumed: ("sdp4bit", "w8_then_w4"),
}
SOME = [(job, name) for job, name in ALL if name in FEWER.get(job, (name,))]
# Those whose state lies on the ranks of a node run on 2 × 2; half as many ranks serve the others.
IN_NODES = (swapped, averaged)


def jobs(folder: str, shape: str, some: list[Any]) -> dict[str, Any]:
    """One start of ranks serves all tests, and one transport all models: each would start threads
    of its own."""
    loop_base.WORLD.shape = shape
    transport = ProcessGroups(cluster_of(shape), Watchdog(100.0))
    with patch("zpp_lab.api.connect", lambda *_: transport), redirect_stderr(StringIO()):
        return {
            f"{job.__name__} {name}": job(name, folder) if job is resumed else job(name)
            for job, name in some
        }


class Few(dict[str, Any]):
    """Answers for `SOME`; a test of another recipe is skipped."""

    def __missing__(self, key: str) -> Any:
        assert key in {f"{job.__name__} {name}" for job, name in ALL}
        pytest.skip("runs among the slow tests")


WORLDS = [
    pytest.param(("", "few", "cpu"), id="gloo-few"),
    pytest.param(("2x2", "groups", "cpu"), id="gloo-2x2", marks=pytest.mark.slow),
    pytest.param(("2x1", "groups", "cpu"), id="gloo-2x1", marks=pytest.mark.slow),
    pytest.param(("1x2", "groups", "cpu"), id="gloo-1x2", marks=pytest.mark.slow),
    pytest.param(("2x1", "groups", "cuda"), id="nccl-2x1", marks=[pytest.mark.gpu, two_ranks]),
    pytest.param(("1x2", "peer", "cuda"), id="peer-1x2", marks=[pytest.mark.gpu, two_gpus]),
]


@pytest.fixture(scope="module", params=WORLDS)
def answers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kinds")
    shape, choice, device = request.param
    if choice == "few":
        nodes = [(j, n) for j, n in SOME if j in IN_NODES or (j, n) == (resumed, "sdp4bit")]
        rest = [case for case in SOME if case not in nodes]
        found: dict[str, Any] = run_world(4, jobs, str(folder), "2x2", nodes)
        return Few(found | run_world(2, jobs, str(folder), "2x1", rest))
    if shape == "2x2":
        return cast(dict[str, Any], run_world(4, jobs, str(folder), shape, ALL))
    return ask(shape, choice, device, [(job.__name__, name) for job, name in ALL], folder)


Answers = dict[str, Any]
RAW = ("zero3", "zero3_reordered", "amsp_node")


def same(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


@pytest.mark.parametrize("name", KEPT)
def test_weights_swapped_in_are_used_and_leave_no_trace(name: str, answers: Answers) -> None:
    """However they are written, rows that change places and signs among them."""
    found = answers[f"swapped {name}"]
    quiet, disturbed = found["losses"]
    assert disturbed == quiet
    assert found["step"] == STEPS
    for right in found["right"]:
        assert sorted(right) == sorted(WAYS)
        assert all(right.values()), "masters travel as they are"
    assert found["told"] == 1


def test_training_goes_on_from_averaged_weights(answers: Answers) -> None:
    for rank in answers["averaged amsp_node"]:
        assert rank == [True] * STEPS


@pytest.mark.parametrize("name", ENDS)
def test_steps_end_with_every_kind_of_optimizer(name: str, answers: Answers) -> None:
    """No version counter of torch tells of an update by foreach or fused kernels."""
    found = answers[f"optimizers {name}"]
    unseen = ("zeroed", "data") if name == "zero3" else ()  # nothing follows from the step there
    # a GPU's fused AdamW rounds otherwise, and codes of quantized gradients follow
    like = 1e-5 if name in RAW or not torch.cuda.is_available() else 1e-2
    for kind, (losses, steps, masters) in found.items():
        other, loose = "adamw foreach" if "adamw" in kind else "sgd", 1e-4 if name in RAW else 0.2
        assert losses == pytest.approx(found[other][0], rel=like), kind
        assert all(masters) or name == "w8_then_w4", kind
        assert losses == pytest.approx(answers["optimizers zero3"][kind][0], rel=loose), kind
        assert steps == (0 if kind in unseen else STEPS), kind
    for kind in ("zeroed", "none", "told"):
        assert found[kind][0] == found["sgd"][0]


@pytest.mark.parametrize("name", MICRO)
def test_an_optimizer_of_ones_own_ends_a_step_of_micro_steps(name: str, answers: Answers) -> None:
    torchs, own = answers[f"own_among_micro_steps {name}"]
    assert own == torchs
    assert own[1] == STEPS


@pytest.mark.parametrize("name", CALLED)
def test_the_clock_does_not_hang_on_the_roots_forward(name: str, answers: Answers) -> None:
    found = answers[f"forwards {name}"]
    with_root, without = ("forward True", "method True", "generate", "unshard"), ("method False",)
    for kind in with_root:
        assert found[kind] == found["forward True"], kind
    for kind in (*without, "units"):
        assert found[kind] == found["forward False"], kind
    assert {steps for _, steps in found.values()} == {STEPS}
    assert found["forward True"][0] != found["forward False"][0]


def test_two_forwards_before_a_backward_are_one_micro_step(answers: Answers) -> None:
    assert answers["two_forwards zeropp"] == [0, 2]


@pytest.mark.parametrize("name", JOBS[raised])
def test_a_backward_that_an_exception_ended_is_given_up(name: str, answers: Answers) -> None:
    said, losses, undisturbed = answers[f"raised {name}"]
    kinds = [kind for kind, _ in said]
    assert kinds == [
        k for k in ("KeyError", "ValueError", "ValueError") for _ in range(len(kinds) // 3)
    ]
    assert losses == undisturbed


@pytest.mark.parametrize("name", APART)
def test_inference_mode_before_the_first_step_is_refused(name: str, answers: Answers) -> None:
    said, (quiet, *evaluated) = answers[f"inference {name}"]
    assert all(kind == "RuntimeError" and "torch.no_grad()" in text for kind, text in said)
    assert evaluated == [quiet] * 2


@pytest.mark.parametrize("name", APART)
def test_gradients_of_other_parameters_on_each_rank_are_named(name: str, answers: Answers) -> None:
    """Of equal and unequal shapes, at once, in a later step, in turns in micro-steps, and where
    some ranks reduce a unit that others do not."""
    found = answers[f"experts {name}"]
    filled = found.pop("filled", None)
    assert filled is None or all(each == ["", ""] for each in filled), "FSDP2 fills up with zeros"
    assert {case.split(",")[0] for case in found} == set(KINDS)
    assert set(CASES[:2]) < set(found)
    for case, said in found.items():
        assert same(said), case
        assert said[0][0] == "ValueError"
        assert re.search(r"layers\.[01]\.[01]\.(weight|bias)", said[0][1]), case


@pytest.mark.parametrize("name", FROZEN)
def test_layers_are_frozen_and_unfrozen_between_steps(name: str, answers: Answers) -> None:
    found, plain = answers[f"frozen_parts {name}"], answers["frozen_parts zero3"]
    assert found["False, fp32"] == found["True, fp32"]
    for case, own in found.items():
        loose = 1e-4 if name in RAW and "bf16" not in case else 0.2
        assert own["losses"] == pytest.approx(plain[case]["losses"], rel=loose), case
        assert own["moved"] == [[], ["head", "laye"], ["head", "laye"], ["laye"], ["laye"]]
        assert own["step"] == 5
        head, everything, again, layers, _ = own["sent"]
        assert name == "zero3" or head < layers < again
        assert name == "zero3" or everything <= again


def test_layers_are_unfrozen_on_one_rank() -> None:
    late, early = run_world(1, frozen_alone)
    assert early == late
    assert early["moved"][1:3] == [["head", "laye"]] * 2


def test_a_model_may_be_collected_within_another_ones_step(answers: Answers) -> None:
    assert all(said == ["", ""] for said in answers["collected zeropp"])


def blocks_alone() -> bool:
    """Whether gradients are the plain model's where the root has no parameters of its own."""
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model = nn.Sequential(*copy.deepcopy(plain))
    shard(model, "zero3", units=list(model))
    x = torch.randn(3, 8)
    plain[1](plain[0](x)).sum().backward()
    model(x).sum().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all(torch.equal(p.grad, cast(Any, q.grad).to_local()) for p, q in pairs)


def test_all_parameters_may_lie_in_units() -> None:
    assert run_world(1, blocks_alone)


def test_unfreezing_between_micro_steps_is_refused(answers: Answers) -> None:
    said = answers["unfrozen_within zeropp"]
    assert same(said)
    assert said[0][0] == "ValueError"
    assert "layers.0.bias" in said[0][1]


@pytest.mark.parametrize("name", INTEGERS)
def test_frozen_integers_travel_as_they_are(name: str, answers: Answers) -> None:
    found = answers[f"integers {name}"]
    for said in (found.pop(key) for key in list(found) if "refused" in key):
        assert all(kind == "ValueError" and "layers.0.codes" in text for kind, text in said)
    for dtype, (sent, buffered) in found.items():
        assert sent[0] == buffered[0], dtype
        assert sent[1] > buffered[1], dtype


@pytest.mark.parametrize("name", BF16)
def test_a_bf16_model_computes_and_sends_in_bf16(name: str, answers: Answers) -> None:
    alone, told, otherwise = answers[f"bf16 {name}"]
    assert alone == told
    assert alone[1:] == [["bf16"], "torch.bfloat16"]
    assert otherwise[1:] == [["fp32"], "torch.float32"]
    assert alone[0] != otherwise[0]


@pytest.mark.parametrize("name", APART)
def test_a_model_is_not_converted_once_it_is_sharded(name: str, answers: Answers) -> None:
    for where, said in answers[f"converted {name}"].items():
        assert same(said), where
        assert said[0][0] == "ValueError", where
        assert re.search(r"layers\.0\..*float32.*float64.*param_dtype=.*masters=", said[0][1])


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_loading_gives_the_same_bits(name: str, order: str, answers: Answers) -> None:
    found = answers[f"resumed {name}"]
    assert len(found["on"]) == STEPS
    assert found[order] == found["on"]


@pytest.mark.parametrize("name", ["w4_diff", "sdp4bit"])
def test_a_state_beside_other_weights_is_refused(name: str, answers: Answers) -> None:
    said = answers[f"resumed {name}"]["of others"]
    assert same(said)
    assert said[0][0] == "ValueError"
    assert "load_state_dict" in said[0][1]


# ---------------------------------------------------------------------- without ranks


def tied(how: str) -> tuple[Net, list[nn.Module]]:
    model = Net()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    if how == "parameter":
        model.layers[1][0].weight = model.layers[0][0].weight
    elif how == "module":
        model.layers[1][0] = model.layers[0][0]
    elif how == "unit":
        model.layers[1] = nn.Sequential(*model.layers[0])
    elif how == "root":
        assert model.head is not None
        model.head.weight = model.layers[1][1].weight
    elif how == "inside":
        model.layers[1][0].weight = model.layers[1][1].weight
    else:
        model.layers[1][0].weight = model.layers[0][0].weight
    return model, [] if how == "none" else list(model.layers)  # then the root holds all


def cut(how: str) -> list[str]:
    model, units = tied(how)
    names = {id(m): n for n, m in model.named_modules()}
    return [u.name for u in cut_units(model, [{names[id(m)]: m} for m in units], 2)]


@pytest.mark.parametrize("how", ["parameter", "module", "unit", "root"])
def test_a_parameter_of_two_units_is_named(how: str) -> None:
    with pytest.raises(ValueError, match=r"layers\..*weight"):
        cut(how)


def test_a_parameter_may_be_used_twice_in_a_unit() -> None:
    assert cut("inside") == ["layers.0", "layers.1", "root"]
    assert cut("none") == ["root"]


@pytest.mark.parametrize(
    ("dtypes", "fits"),
    [
        ((torch.float32, torch.float32), True),
        ((torch.bfloat16, torch.float32), False),
        ((torch.complex64, torch.complex64), False),
    ],
)
def test_trained_parameters_of_a_unit_have_one_dtype(
    dtypes: tuple[torch.dtype, ...], fits: bool
) -> None:
    own = {f"p{i}": nn.Parameter(torch.zeros(2, dtype=d)) for i, d in enumerate(dtypes)}
    with nullcontext() if fits else pytest.raises(ValueError, match="p0"):
        check_dtypes("unit", own)
    own["p1"].requires_grad_(False)
    if dtypes[0].is_floating_point:
        check_dtypes("unit", own)


def test_the_models_dtype_is_one_that_weights_travel_in() -> None:
    assert _own_dtype(Net()) == "fp32"
    assert _own_dtype(Net().bfloat16()) == "bf16"
    mixed = Net()
    mixed.layers[1].bfloat16()
    for model in (mixed, Net().half(), Net().double()):
        with pytest.raises(ValueError, match="param_dtype"):
            _own_dtype(model)
