"""Timelines small enough to work out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from zpp_lab.tools.plan.cost.timeline import Timeline


@pytest.mark.parametrize("seed", range(20))
def test_no_resource_is_used_twice_at_once_and_nobody_waits_without_reason(seed: int) -> None:
    draw, line = random.Random(seed), Timeline()
    for i in range(60):
        after = draw.sample(range(i), min(i, draw.randrange(3)))
        uses = draw.choice([None, "gpu", "link"])
        line.add("t", f"stream{draw.randrange(4)}", uses, draw.randrange(1, 9), after)
    ends = line.run()
    begins = [end - task.seconds for end, task in zip(ends, line.tasks, strict=True)]
    for name in ("gpu", "link"):
        own = sorted(
            (b, e) for b, e, t in zip(begins, ends, line.tasks, strict=True) if t.uses == name
        )
        assert all(first[1] <= second[0] for first, second in pairwise(own))
    for number, task in enumerate(line.tasks):
        reasons = {0.0, *(ends[w] for w in task.after)}
        reasons |= {ends[i] for i, t in enumerate(line.tasks) if t.stream == task.stream}
        reasons |= {ends[i] for i, t in enumerate(line.tasks) if t.uses == task.uses and t.uses}
        assert begins[number] in reasons
        assert all(ends[w] <= begins[number] for w in task.after)
