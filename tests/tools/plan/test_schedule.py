"""Timelines small enough to work out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from zpp_lab.tools.plan.cost.model import Timeline


def test_a_lane_keeps_its_order_and_lanes_run_side_by_side() -> None:
    line = Timeline()
    line.add("a", "one", None, 2.0)
    line.add("a", "one", None, 1.0)
    line.add("b", "two", None, 2.5)
    assert line.run() == [2.0, 3.0, 2.5]
    assert line.kinds() == {"a": 3.0, "b": 2.5}


def test_a_resource_serves_one_at_a_time_the_longest_ready_first() -> None:
    line = Timeline()
    line.add("a", "one", "link", 2.0)
    late = line.add("b", "two", None, 0.5)
    line.add("b", "two", "link", 1.0, [late])  # ready at 0.5, the link is free at 2
    early = line.add("c", "three", None, 0.25)
    line.add("c", "three", "link", 1.0, [early])  # ready at 0.25: before b
    assert line.run() == [2.0, 0.5, 4.0, 0.25, 3.0]
    assert line.busy() == {"link": 4.0}


def test_a_task_waits_for_all_it_names() -> None:
    line = Timeline()
    a = line.add("a", "one", None, 1.0)
    b = line.add("b", "two", None, 3.0)
    line.add("c", "one", None, 1.0, [a, b, None])
    assert line.run()[-1] == 4.0


def test_only_earlier_tasks_can_be_waited_for() -> None:
    with pytest.raises(AssertionError, match="later"):
        Timeline().add("a", "one", None, 1.0, [0])


@pytest.mark.parametrize("seed", range(20))
def test_no_resource_is_used_twice_at_once_and_nobody_waits_without_reason(seed: int) -> None:
    draw, line = random.Random(seed), Timeline()
    for i in range(60):
        after = draw.sample(range(i), min(i, draw.randrange(3)))
        uses = draw.choice([None, "gpu", "link"])
        line.add("t", f"lane{draw.randrange(4)}", uses, draw.randrange(1, 9), after)
    ends = line.run()
    begins = [end - task.seconds for end, task in zip(ends, line.tasks, strict=True)]
    for name in ("gpu", "link"):
        own = sorted(
            (b, e) for b, e, t in zip(begins, ends, line.tasks, strict=True) if t.uses == name
        )
        assert all(first[1] <= second[0] for first, second in pairwise(own))
    for number, task in enumerate(line.tasks):
        reasons = {0.0, *(ends[w] for w in task.after)}
        reasons |= {ends[i] for i, t in enumerate(line.tasks) if t.lane == task.lane}
        reasons |= {ends[i] for i, t in enumerate(line.tasks) if t.uses == task.uses and t.uses}
        assert begins[number] in reasons
        assert all(ends[w] <= begins[number] for w in task.after)
