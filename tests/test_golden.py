"""Today's code computes the bits that golden.json has recorded: see `tests/golden.py`."""

from __future__ import annotations

import pytest

from tests import golden


def assert_as_recorded(part: str, **more: object) -> None:
    found, wanted = golden.computed(part, **more), golden.recorded()[part]
    if part == "gloo":
        wanted = {name: wanted[name] for name in found}
    wrong = golden.differences(found, wanted)
    assert not wrong, "\n".join([*wrong, "meant so? python -m tests.golden --write " + part])


@pytest.fixture
def same_arithmetic() -> None:
    here, there = golden.machine(), golden.recorded()["machine"]
    if here != there:
        pytest.skip(f"torch computes otherwise here: {here}, golden.json has {there}")


@pytest.mark.parametrize("part", golden.EVERYWHERE)
def test_bits_that_are_the_same_everywhere(part: str) -> None:
    assert_as_recorded(part)


@pytest.mark.usefixtures("same_arithmetic")
@pytest.mark.parametrize("part", ["virtual", "study"])
def test_bits_of_training(part: str) -> None:
    assert_as_recorded(part)


@pytest.mark.usefixtures("same_arithmetic")
@pytest.mark.parametrize(
    "world", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in (3, 4))], ids=str
)
def test_bits_of_real_ranks(world: int) -> None:
    assert_as_recorded("gloo", worlds=(world,))


@pytest.mark.slow
@pytest.mark.usefixtures("same_arithmetic")
def test_bits_of_whole_runs_of_a_study() -> None:
    assert_as_recorded("smoke")


def test_one_bit_is_a_difference() -> None:
    wanted, found = golden.recorded()["extreme"], golden.recorded()["extreme"]
    name = next(iter(wanted["by input"]))
    found["by input"][name] = "0" * 16
    found["by codec"].pop("none 4 bytes")
    lines = [line.partition(":")[0] for line in golden.differences(found, wanted)]
    assert lines == ["/by codec/none 4 bytes", f"/by input/{name}"]
