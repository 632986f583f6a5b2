"""The chosen plan is the fastest of all, as trying every plan shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.tools.plan.search.fastest import TIE, NothingFits, Option, Problem, options, search
from zpp_lab.tools.plan.search.limits import read_limit
from zpp_lab.tools.plan.search.shown import notes, rows
from zpp_lab.train.memory.buffers import GIB

from .problems import problem, study

SMALL = (None, 4)


def every(problem: Problem) -> list[tuple[float, Option]]:
    """(seconds, plan) of all that there is, without any shortcut."""
    found, _ = options(problem)
    timed = [
        (predict(o.candidate.config(problem.base), problem.machine, problem.link_gbps).step_s, o)
        for o in found
    ]
    return sorted(timed, key=lambda pair: pair[0])


SLOW = [pytest.param("2x2", link, marks=pytest.mark.slow) for link in (0.5, 400.0)]


@pytest.mark.parametrize(("cluster", "link"), [("2x1", 0.5), *SLOW])
def test_no_plan_that_fits_is_faster(cluster: str, link: float) -> None:
    asked = problem(f"cluster={cluster}", link=link, bits=SMALL)
    found = every(asked)
    peaks = sorted(o.peak for _, o in found)
    for gib in (80.0, peaks[len(peaks) // 8] / GIB):
        tight = replace(asked, device=int(gib * GIB))
        best = min(seconds for seconds, o in found if o.peak <= tight.device)
        answer = search(tight)
        assert answer.fits(answer.chosen)
        assert best <= answer.chosen.step_s <= best * (1 + 2 * TIE)
        gentle = min(
            o.gentle
            for t in (answer.chosen, *answer.next_best)
            if t.step_s <= best * (1 + TIE)
            for o in (t.option,)
        )
        assert answer.chosen.option.gentle == gentle, "as fast, and none of these rounds less"
        for kind in (answer.too_large, answer.next_best):
            assert [t.step_s for t in kind] == sorted(t.step_s for t in kind)
        assert all(o.floor <= seconds * (1 + 1e-9) for seconds, o in found)


@pytest.mark.parametrize(("link", "blocks"), [(0.01, 1), (400.0, 4)])
def test_units_are_larger_where_the_host_is_the_bound(link: float, blocks: int) -> None:
    eager = problem("model.layers=8", "engine.graph=false", link=link, bits=(None,))
    answer = search(eager)
    assert answer.chosen.time.bound == ("host" if blocks > 1 else "between nodes")
    assert answer.chosen.option.candidate.knobs.blocks_per_unit == blocks
    advised = any("engine.graph=auto" in note for note in notes(answer))
    assert advised == (blocks > 1)  # a graph gains where the host is the bound


def test_the_study_limits_the_choice(tmp_path: Path) -> None:
    limit = read_limit(study(tmp_path / "study"))
    few = ("model=125m", "model.layers=2", "cluster=2x1")  # plans by the hundred, not the thousand
    answer = search(problem(*few, link=1.0, limit=limit, bits=(None, 4, 2)))
    recipe = answer.chosen.option.candidate.recipe
    assert answer.chosen.option.ruling.arm == "w4"
    assert recipe.weights.bits == 4
    assert recipe.grads.bits is None
    assert answer.chosen.option.candidate.knobs.optimizer_state == "fp32"
    assert recipe.secondary or recipe.stage == 2  # 4 bits once between nodes: the least there is
    assert answer.speed_up(answer.chosen) > 1.3
    assert {t.option.ruling.kind for t in answer.unmeasured} == {"not measured"}
    assert {t.option.ruling.arm for t in answer.too_lossy} <= {"w2", "g4"}
    for turned_down in (*answer.unmeasured, *answer.too_lossy):
        assert turned_down.step_s < answer.chosen.step_s
    assert answer.promising is not None
    assert sum(answer.promising.option.wire_bits) > sum(answer.unmeasured[0].option.wire_bits)


LONG = ("model=1_3b", "data.seq_len=2048", "train.batch_size=4")


def test_nothing_fits() -> None:
    with pytest.raises(NothingFits) as found:
        search(problem(*LONG, "model.layers=6", gib=2, bits=(None,)))
    closest = found.value.closest
    assert closest.candidate.knobs.checkpoint_activations
    assert found.value.others == 0
    assert closest.peak > 2 * GIB


def test_what_cannot_be_predicted_is_said() -> None:
    with pytest.raises(ValueError, match=r"set train\.param_dtype=bf16"):
        search(problem("train.param_dtype=fp32", bits=(None,)))


def test_plain_plans_and_the_raw_twin_stand_beside_the_choice() -> None:
    """What torch does by itself counts at its strongest; the twin tells bits from partition."""
    asked = problem(link=0.01, bits=SMALL)
    answer = search(asked)
    names = [t.option.candidate.recipe.name for t in answer.plains]
    assert {"zero3", "hsdp"} <= set(names)
    assert answer.plain.step_s == min(t.step_s for t in answer.plains)
    assert all(t.option.candidate.recipe.plain for t in answer.plains)
    assert answer.twin is not None
    own = answer.chosen.option.candidate
    assert answer.twin.option.candidate.knobs == own.knobs
    assert not answer.twin.option.candidate.recipe.coded
    assert answer.twin.option.candidate.recipe.parts == own.recipe.parts
    assert answer.twin.step_s > answer.chosen.step_s
    kinds = {kind for _, kind, _ in rows(answer)}
    assert {"plain", "twin", "chosen"} <= kinds
    assert search(replace(asked, bits=(None,))).twin is None
