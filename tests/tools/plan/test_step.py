"""Steps on machines simple enough to work out by hand, and what must hold for every recipe."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of
from zpp_lab.tools.plan.cost import machine as figures
from zpp_lab.tools.plan.cost.show import graph_line
from zpp_lab.tools.plan.cost.split import makespan
from zpp_lab.tools.plan.cost.step import LAUNCH, predict, replays
from zpp_lab.train.memory.shards import optimizer_bytes
from zpp_lab.train.speed import block_work

EAGER = "engine.graph=false"
BASE = ["engine=fsdp", EAGER, "train.param_dtype=bf16", "train.reduce_dtype=bf16", "cluster=2x2"]
RECIPES = ["zero3", "zero3_reordered", "w8", "w4", "w2", "zeropp", "qsdp", "g8_4_hadamard"]
NOTHING = 1e-30
CODECS = ("raw", "8", "4", "2", "8r", "8h", "4h")


def machine(**changes: object) -> figures.Machine:
    """One on which everything but what is changed takes no time."""
    codec = {op: dict.fromkeys(CODECS, NOTHING) for op in figures.OPERATORS}
    free = figures.Curve(((1.0, NOTHING),))
    made = figures.Machine(
        name="ideal",
        compute={"eager": free},
        memory_bytes_per_s=1e30,
        host=figures.Host({"eager": 0.0}, {"eager": 0.0}, 0.0, 0.0, 0.0, 0.0),
        intra=figures.Inside(free, free, 0.0),
        inter=figures.Between(0.0, 1.0),
        codec=figures.Codec(0.0, codec),
        comment={},
    )
    return replace(made, **changes)


def config(*overrides: str) -> Config:
    return compose([*BASE, *overrides])


def node_bytes(settings: Config) -> float:
    """Between nodes, of one node."""
    total = sum(t.inter for t in plan_of(settings).step_bytes().values())
    return total / settings.cluster.nodes


@pytest.mark.parametrize("recipe", ["zero3_reordered", "w8", "zeropp", "g8_4_hadamard", "w4_diff"])
def test_where_only_the_link_takes_time_the_step_is_its_bytes(recipe: str) -> None:
    settings = config(f"recipe={recipe}")
    found = predict(settings, machine(), link_gbps=8e-3)  # a million bytes a second
    assert found.step_s == pytest.approx(node_bytes(settings) / 1e6)
    assert found.inter_s == pytest.approx(found.step_s)
    assert found.bound == "between nodes"


def test_larger_units_take_the_host_less_time_and_the_gpu_and_links_as_much() -> None:
    host = figures.Host({"eager": 1.0}, {"eager": 2.0}, 0.25, 0.5, 4.0, 8.0)
    settings = config("recipe=zeropp", "model.layers=5", "engine.blocks_per_unit=2")
    found = predict(settings, machine(host=host), None)
    gathers, reductions = 4 + 3, 4  # three units, the last of one block, and the root
    assert found.step_s == pytest.approx(5 * 3.0 + gathers * 0.25 + reductions * 0.5 + 12.0)
    single = replace(settings, engine=replace(settings.engine, blocks_per_unit=1))
    busy = machine(compute={"eager": figures.Curve(((0.0, 1.0), (1e6, 2.0)))})
    one, two = (predict(s, busy, 1e-3) for s in (single, settings))
    assert two.compute_s == pytest.approx(one.compute_s)
    assert two.inter_s == pytest.approx(one.inter_s)


def test_fsdp2_sends_a_ring_between_nodes() -> None:
    settings = config("recipe=zero3")
    plan = plan_of(settings)
    rows = sum(u.forward.nbytes + u.hops[0].nbytes for u in plan.units)
    rows += sum(u.backward.nbytes for u in plan.units if u.gathers_backward)
    found = predict(settings, machine(), link_gbps=8e-3)
    assert found.step_s == pytest.approx(3 * rows / 1e6)  # W - 1 rows of each unit


def test_where_only_computation_takes_time_it_is_the_flops() -> None:
    settings = config("recipe=zeropp")
    busy = machine(compute={"eager": figures.Curve(((1e6, 1.0),))})
    unit = plan_of(settings).units[0]
    work = block_work(unit, settings)
    tokens = settings.train.batch_size * settings.data.seq_len
    head = 2 * 256 * settings.model.dim * tokens
    assert (work.backward, work.recompute) == (2 * work.forward, 0)
    flops = 3 * (settings.model.layers * work.forward + head)
    assert predict(settings, busy, 100.0).step_s == pytest.approx(flops / 1e6)
    again = predict(config("recipe=zeropp", "model.checkpoint_activations=true"), busy, 100.0)
    assert again.step_s == pytest.approx((flops + settings.model.layers * work.forward) / 1e6)


def test_where_the_host_is_slow_it_is_the_step() -> None:
    host = figures.Host({"eager": 1.0}, {"eager": 2.0}, 0.25, 0.5, 4.0, 8.0)
    settings = config("recipe=zeropp", "model.layers=3")
    found = predict(settings, machine(host=host), None)
    gathers, reductions = 4 + 3, 4  # the root is gathered once
    assert found.step_s == pytest.approx(3 * 3.0 + gathers * 0.25 + reductions * 0.5 + 12.0)
    assert found.bound == "host"
    assert found.exposed_s == pytest.approx(found.step_s)


@pytest.mark.parametrize(
    ("overrides", "graph"),
    [
        ([], True),
        (["engine.graph=true"], True),
        ([EAGER], False),
        (["engine.device=cpu"], False),
        (["engine.offload=true"], False),
    ],
)
def test_a_graph_is_assumed_where_the_engine_replays_one(overrides: list[str], graph: bool) -> None:
    assert replays(compose(["engine=fsdp", *overrides])) == graph
    asked = "engine.graph=true" in overrides  # a loop of FSDP2's own has none by itself
    assert replays(compose(["engine=fsdp", *overrides]), own_loop=False) == asked


@pytest.mark.parametrize("recipe", ["zeropp", "amsp_node"])
def test_a_graph_spares_the_host_forward_and_backward(recipe: str) -> None:
    host = figures.Host({"eager": 1.0}, {"eager": 2.0}, 0.25, 0.5, 4.0, 8.0)
    settings = config(
        f"recipe={recipe}", "model.layers=3", "train.micro_steps=2", "engine.graph=auto"
    )
    renewed = 4 * 0.25 if recipe == "amsp_node" else 0.0  # of three blocks and the root
    found = predict(settings, machine(host=host), None)
    assert found.host_s == found.step_s == pytest.approx(LAUNCH + renewed + 12.0)
    busy = machine(host=host, compute={"eager": figures.Curve(((1e6, 1.0),))})
    found = predict(settings, busy, None)  # the rest is started while the graph runs
    assert found.exposed_s == pytest.approx(LAUNCH)
    assert found.step_s == pytest.approx(LAUNCH + found.compute_s)


@pytest.mark.parametrize("graph", ["auto", "false"])
def test_a_graph_leaves_gpu_and_links_alone(graph: str) -> None:
    h200, sizes = (
        figures.load_machine("h200"),
        ["model=1_3b", "recipe=diff_g84h", "data.seq_len=2048"],
    )
    eager = predict(config(*sizes), h200, 25.0)
    found = predict(config(*sizes, f"engine.graph={graph}"), h200, 25.0)
    for name in ("compute_s", "codec_s", "optimizer_s", "intra_s", "inter_s"):
        assert getattr(found, name) == pytest.approx(getattr(eager, name))
    assert (found.step_s == eager.step_s) == (graph == "false")
    assert found.host_s <= eager.host_s


def test_new_weights_hide_behind_the_forward() -> None:
    """Blocks compute for long, so only the root's and the first block's new weights are waited for,
    and the reductions that no backward is left to hide."""
    settings = config("recipe=amsp_node")
    plan = plan_of(settings)
    block = block_work(plan.units[0], settings).forward
    slow = machine(compute={"eager": figures.Curve(((block, 1.0),))})
    found = predict(settings, slow, link_gbps=8.0)
    first = [u.leg("weights_update").traffic.inter / 2 for u in (plan.units[-1], plan.units[0])]
    last = [u.leg("grads_inter").traffic.inter / 2 for u in (plan.units[0], plan.units[-1])]
    assert found.exposed_s == pytest.approx(sum(first + last) / 1e9)


def test_gathers_hide_behind_the_block_before() -> None:
    """Two equal blocks and next to no root: forward of one block takes as long as its gather."""
    settings = config("recipe=zero3", "cluster=1x4", "recipe.stage=2", "train.reduce_dtype=bf16")
    plan = plan_of(settings)
    block = block_work(plan.units[0], settings).forward
    row = 3 * plan.units[0].forward.nbytes
    root = 3 * plan.units[-1].forward.nbytes
    gather = figures.Curve(((float(row), 1.0),))
    slow = machine(
        compute={"eager": figures.Curve(((block, 1.0),))},
        intra=figures.Inside(gather, figures.Curve(((1.0, NOTHING),)), 0.0),
    )
    head = 2 * 256 * settings.model.dim * settings.train.batch_size * settings.data.seq_len / block
    found = predict(settings, slow)
    # root's gather, the first block's, two forwards (the second gather beside the first), and
    # the head; backward takes twice as long and gathers nothing
    assert found.step_s == pytest.approx(root / row + 1 + 2 + head + 2 * (2 + head))
    assert found.exposed_s == pytest.approx(root / row + 1)


@pytest.mark.parametrize("graph", ["auto", "false"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_seconds_add_up_and_faster_links_are_never_slower(recipe: str, graph: str) -> None:
    settings = config(
        *("model=1_3b", "data.seq_len=2048", "train.batch_size=1"),
        *(f"recipe={recipe}", f"engine.graph={graph}"),
    )
    h200 = figures.load_machine("h200")
    found = [predict(settings, h200, gbps) for gbps in (5, 12, 25, 50, 100, 400)]
    for one in found:
        own = one.compute_s + one.codec_s + one.optimizer_s + one.exposed_s
        assert own == pytest.approx(one.step_s)
        assert one.step_s >= max(one.inter_s, one.intra_s, one.host_s) * (1 - 1e-9)
        assert one.tokens_per_s == pytest.approx(4 * 2048 / one.step_s)
    for slower, faster in pairwise(found):
        assert faster.step_s <= slower.step_s * (1 + 1e-9)


def test_several_micro_steps_that_reduce_once_send_less() -> None:
    every = config("recipe=zeropp", "train.micro_steps=4")
    once = config("recipe=zeropp", "train.micro_steps=4", "train.accumulate=last")
    long, short = (predict(c, machine(), 8e-3) for c in (every, once))
    assert long.step_s == pytest.approx(node_bytes(every) / 1e6)
    assert short.step_s == pytest.approx(node_bytes(once) / 1e6)


@pytest.mark.parametrize("acts", ["none", "8", "4"])
def test_nothing_hides_what_tensor_parts_exchange(acts: str) -> None:
    """All that a rank receives, where it is the only thing that takes time."""
    bits = [] if acts == "none" else [f"recipe.acts.bits={acts}"]
    settings = config("cluster=1x2", "cluster.tp=2", "train.micro_steps=3", *bits)
    link = figures.Curve(((1.0, 1e-6),))
    found = predict(settings, machine(intra=figures.Inside(link, link, 0.0)))
    received = sum(t.intra for t in plan_of(settings).step_bytes().values()) / 2
    assert found.step_s == pytest.approx(received / 1e6)
    assert found.parts_s == pytest.approx(found.step_s)


def test_cells_of_a_node_share_its_link() -> None:
    whole, halved = config("recipe=w8"), config("recipe=w8", "cluster.tp=2")
    for settings in (whole, halved):
        found = predict(settings, machine(), link_gbps=8e-3)
        assert found.step_s == pytest.approx(node_bytes(settings) / 1e6)


def test_tensor_parts_divide_the_computation() -> None:
    work = machine(compute={"eager": figures.Curve(((1.0, 1e-6),))})
    whole, halved = config("cluster=1x2"), config("cluster=1x2", "cluster.tp=2")
    one, two = (predict(settings, work).step_s for settings in (whole, halved))
    assert two == pytest.approx(one / 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "1f1b_overlap"])
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (3, 3)])
def test_a_pipeline_has_its_bubble(stages: int, micros: int, schedule: str) -> None:
    found = makespan([1.0] * stages, [2.0] * stages, 0.0, micros, schedule)
    assert found == pytest.approx((micros + stages - 1) * 3.0)


def test_a_pipeline_waits_for_what_it_sends() -> None:
    """By hand: stage 1 starts its second forward once its first gradient has gone, at 5."""
    assert makespan([1.0, 1.0], [2.0, 2.0], 0.5, 2, "1f1b") == pytest.approx(10.5)


@pytest.mark.parametrize("transfer", [1.5, 3.0, 4.0])
def test_computing_hides_transfers_of_1f1b_overlap(transfer: float) -> None:
    """By hand: what two micro-steps compute takes 9; the first one's transfers add to it. Each
    further micro-step takes its computing or a transfer, whichever is longer."""
    assert makespan([1.0, 1.0], [2.0, 2.0], 0.5, 2, "1f1b_overlap") == pytest.approx(10.0)
    for stages in (2, 4):
        last, more = (
            makespan([1.0] * stages, [2.0] * stages, transfer, n, "1f1b_overlap") for n in (30, 31)
        )
        assert more - last == pytest.approx(max(3.0, transfer))


PIPE = ["cluster=2x1", "cluster.pp=2", "recipe.stage=2", "train.micro_steps=4", "model.layers=4"]


def test_stages_divide_blocks_and_wait_for_each_other() -> None:
    work = machine(compute={"eager": figures.Curve(((1.0, 1e-6),))})
    settings = config(*PIPE)
    units = [block_work(u, settings) for u in plan_of(settings).units if u.unit.blocks]
    block, train = units[0].forward / 1e6, settings.train
    head = 2 * 256 * settings.model.dim * train.batch_size * settings.data.seq_len / 1e6
    found = predict(settings, work)
    assert found.compute_s == pytest.approx(4 * (2 * 3 * block + 3 * head))  # the last stage's
    assert found.stages_s == pytest.approx(2 * 3 * block)  # the first micro-step's other stage
    own = found.compute_s + found.codec_s + found.optimizer_s + found.exposed_s
    assert own == pytest.approx(found.step_s)
    kinds = ("forward", "backward", "head")
    assert sum(found.parts[kind] for kind in kinds) == pytest.approx(found.compute_s)
    assert found.bound == "computation"


def test_codecs_of_crossings_take_the_stages_time() -> None:
    """Each of two stages encodes once a micro-step: the first its activations, the second their
    gradient; one waits for the other."""
    settings = config(*PIPE, "recipe.acts_pipe.bits=8")
    codec = {op: dict.fromkeys(CODECS, NOTHING) for op in figures.OPERATORS}
    codec["encode"]["8"] = 1e-6
    slow = machine(memory_bytes_per_s=1e6)  # updates take longer than all crossings
    free = predict(settings, slow)
    found = predict(settings, replace(slow, codec=figures.Codec(0.0, codec)))
    pipe = plan_of(settings).pipe
    assert pipe is not None
    each = pipe.layout.segments[0].coded_numel / 1e6
    assert free.step_s > 4 * each
    assert found.codec_s - free.codec_s == pytest.approx(4 * each)
    assert found.step_s - free.step_s == pytest.approx((4 + 1) * each)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_crossings_between_nodes_take_the_link(bits: int | None) -> None:
    """Where nothing else takes time, micro-steps cross one after the other, there and back."""
    settings = config(*PIPE, *([f"recipe.acts_pipe.bits={bits}"] if bits else []))
    found = predict(settings, machine(), link_gbps=8e-3)
    each = node_bytes(settings) / 4 / 1e6  # of a micro-step, one way
    assert found.inter_s == pytest.approx(4 * each)
    assert 4 * each < found.step_s <= 8 * each * (1 + 1e-9)
    assert found.stages_s == pytest.approx(found.step_s)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*PIPE, "engine.schedule=interleaved"], r"engine\.schedule"),
        (["train.param_dtype=fp32"], "param_dtype=bf16"),
        (["engine.offload=true"], r"engine\.offload=false"),
        (["train.optimizer_state=8bit", "train.optimizer_place=host"], "bench calibrate"),
        (["train.masters=split", "engine.place=host"], "bench calibrate"),
        (["engine=deepspeed", "recipe=zero3"], "engine=fsdp"),
        (["engine.compile=true"], r"engine\.compile=false"),
        (["recipe=w8", "recipe.weights.bits=6"], r"encode\.6"),
        (["recipe=g2_ef"], r"without memory\.kind"),
    ],
)
def test_what_has_no_figures_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(config(*overrides), machine(), 10.0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora=q4", "model.weights=pretrained", "model.path=FOLDER"],
        ["model.tied_head=true", "model.loss_chunk=16"],
        ["recipe.stage=1", "train.micro_steps=2"],
        ["engine.prefetch=0"],
        ["model.checkpoint_activations=true"],
        ["engine.prefetch=3"],
        ["engine.blocks_per_unit=3", "model.checkpoint_activations=true"],
        ["train.optimizer_state=8bit"],
        ["cluster.nodes=1", "cluster.gpus_per_node=1"],
        ["cluster.nodes=4", "cluster.gpus_per_node=1"],
        ["cluster=2x2", "cluster.tp=2", "recipe.acts.bits=8"],
        ["cluster=2x8", "cluster.tp=2", "cluster.pp=4", "recipe.stage=2", "train.micro_steps=4"],
    ],
)
def test_every_kind_of_run_has_a_step(overrides: list[str]) -> None:
    words = ["engine=fsdp", "train.param_dtype=bf16", "recipe=zero3", "model.layers=4"]
    found = predict(compose([*words, *overrides]), figures.load_machine("h200"), 1.0)
    own = found.compute_s + found.codec_s + found.optimizer_s + found.exposed_s
    assert own == pytest.approx(found.step_s)
    assert found.step_s >= max(found.inter_s, found.intra_s, found.host_s) * (1 - 1e-9)


PLACED = ["train.masters=split", "train.optimizer_state=8bit", "model.layers=3"]
BUS = figures.Bus(to_device=2e6, to_host=1.5e6, both=2e6, pin_s_per_gib=0.0)


def planes(settings: Config) -> tuple[int, list[int]]:
    """Elements of rank 0's shards, and bytes of the updates of the root and the blocks: low planes,
    moments, and gradients in bf16."""
    plan = plan_of(settings)
    every = [u.unit.parameters for u in (plan.units[-1], *plan.units[:-1])]
    moments = [optimizer_bytes(ps, "8bit") for ps in every]
    own = [2 * 2 * sum(p.shard_numel for p in ps) for ps in every]
    return sum(own) // 4, [m + o for m, o in zip(moments, own, strict=True)]


def flushed(comes: list[int], settings: Config) -> float:
    """Seconds of units that come in two turns, of which all but gradients goes back."""
    plan, came, left, gone = plan_of(settings), 0.0, 0.0, [0.0, 0.0]
    for i, (nbytes, unit) in enumerate(zip(comes, (plan.units[-1], *plan.units), strict=False)):
        gradients = 2 * sum(p.shard_numel for p in unit.unit.parameters)
        came = max(came, gone[i % 2]) + nbytes
        left = gone[i % 2] = max(came, left) + nbytes - gradients
    return left / 1e6


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_state_in_host_memory_takes_a_lane_of_the_bus_each_way(shape: tuple[int, int]) -> None:
    """Where only the bus takes time, gradients leave after all updates came."""
    cluster = [f"cluster.nodes={shape[0]}", f"cluster.gpus_per_node={shape[1]}"]
    settings = compose([*BASE[:-1], *cluster, "recipe=zero3", *PLACED, "engine.place=host"])
    numel, comes = planes(settings)
    found = predict(settings, machine(bus=BUS))
    back = sum(comes) - 2 * numel
    assert found.bus_s == pytest.approx(max(sum(comes) / 1e6, back / 1e6 + 2 * numel / 1.5e6))
    # every unit is one stage: its planes come once those of the one before the last have gone
    assert found.flush_s == pytest.approx(flushed(comes, settings))
    assert found.step_s == pytest.approx(found.flush_s + 2 * numel / 1.5e6)
    assert found.exposed_s == pytest.approx(found.step_s)
    assert found.bound == "bus to host memory"


def test_updates_hide_behind_the_forward_but_for_the_first_units() -> None:
    words = [*BASE[:-1], "cluster.nodes=1", "cluster.gpus_per_node=1", "recipe=zero3", *PLACED]
    settings = compose([*words, "engine.place={masters: 4, moments: 4}"])
    _, comes = planes(settings)
    grads = [2 * sum(p.shard_numel for p in u.unit.parameters) for u in plan_of(settings).units]
    root, first, *_ = (c - g for c, g in zip(comes, [grads[-1], *grads[:-1]], strict=True))
    block = block_work(plan_of(settings).units[0], settings).forward
    slow = machine(compute={"eager": figures.Curve(((block, 100.0),))}, bus=BUS)
    # the first block computes once its planes have come and are updated
    assert predict(settings, slow).exposed_s == pytest.approx((root + first) / 1e6)
    assert predict(settings, slow).flush_s > 0
    engine = replace(settings.engine, place="device")
    here = predict(replace(settings, engine=engine), machine(bus=None))
    assert (here.bus_s, here.flush_s) == (0.0, 0.0)


def test_later_micro_steps_bring_earlier_sums() -> None:
    words = [*BASE, "recipe=zero3", *PLACED, "train.micro_steps=3", "engine.place={gradients: 4}"]
    settings = compose(words)
    numel, _ = planes(settings)
    found = predict(settings, machine(bus=BUS)).parts
    assert found["gradients out"] == pytest.approx(3 * 2 * numel / 1.5e6)
    assert found["gradients in"] == pytest.approx(2 * 2 * numel / 1e6)


@pytest.mark.parametrize(
    ("words", "blocks", "roots"),
    [
        (["recipe=zero3"], 1, 0),
        (["recipe=zero3", "train.micro_steps=2"], 3, 1),
        (["recipe=zero3", "recipe.stage=2"], 0, 0),
        (["recipe=zeropp"], 0, 0),  # its backward gathers what nodes have
        (["recipe=w4_diff"], 0, 0),
        (["recipe=zero3", "train.clip_by=unit"], 2, 1),
    ],
)
def test_weights_in_host_memory_come_for_each_gather_that_reads_them(
    words: list[str], blocks: int, roots: int
) -> None:
    """So many times besides their update, after which they leave."""
    settings = compose([*BASE, *PLACED, "engine.place={weights: 4}", *words])
    *others, root = (sum(p.shard_numel for p in u.unit.parameters) for u in plan_of(settings).units)
    found = predict(settings, machine(bus=BUS)).parts
    update = 2 * (sum(others) + root) / 1e6
    assert found["state out"] == pytest.approx(update)
    more = 2 * (blocks * sum(others) + roots * root) / 1e6
    assert found["state in"] == pytest.approx(update + more)
    assert not replays(settings)


def test_moments_that_pass_at_the_end_of_a_step_hide_behind_nothing() -> None:
    words = ["recipe=zero3", "train.optimizer_state=8bit", "train.optimizer_place=host"]
    settings = compose([*BASE, *words])
    moments = sum(optimizer_bytes(u.unit.parameters, "8bit") for u in plan_of(settings).units)
    assert predict(settings, machine(bus=BUS)).step_s == pytest.approx(2 * moments / 1e6)


def test_clipped_by_unit_a_unit_is_updated_once_the_next_one_is_reduced() -> None:
    one = ["cluster.nodes=1", "cluster.gpus_per_node=1", "train.clip_by=unit"]
    settings = compose([*BASE[:-1], *one, "recipe=zero3", *PLACED, "engine.place=host"])
    plan = plan_of(settings)
    grads = [2 * sum(p.shard_numel for p in u.unit.parameters) for u in plan.units]
    _, comes = planes(settings)
    root, first, second, last = (
        2 * (c - g) / 1e6 for c, g in zip(comes, [grads[-1], *grads[:-1]], strict=True)
    )
    found = predict(settings, machine(bus=BUS))
    assert found.step_s == pytest.approx(root + first + second + last)
    assert found.flush_s == 0
    assert "gradients out" not in found.parts
    block = block_work(plan.units[0], settings).forward
    slow = machine(compute={"eager": figures.Curve(((block, 100.0),))}, bus=BUS)
    assert predict(settings, slow).exposed_s == pytest.approx(root + first + second)
    auto = replace(settings, engine=replace(settings.engine, place="device", graph="auto"))
    assert not replays(auto)
    assert "train.clip_by" in graph_line(auto, machine(), {})
