"""Today's code computes the bits that golden.json has recorded: see `tests/golden.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import golden, golden_runs, snapshot
from tests.engines import fsdp_parity as parity


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


def test_a_file_of_ones_own_names_the_case_that_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "base.json"
    words = ["cases", "virtual", "--cases", "cases/host_states", "virtual/zero[12]"]
    words += ["--against", str(file)]
    assert golden.main([*words, "--write"]) == golden.main(words) == 0
    held = json.loads(file.read_text())
    assert {part: [*held[part]] for part in ("cases", "virtual")} == {
        "cases": ["host_states"],
        "virtual": ["zero2", "zero1"],
    }
    held["cases"]["host_states"]["state"] = "0" * 16
    file.write_text(json.dumps(held))
    capsys.readouterr()
    assert golden.main(words) == 1
    assert capsys.readouterr().out.startswith("/cases/host_states/state: ")


def test_every_kind_of_state_is_recorded() -> None:
    """On real ranks: what a refactoring could move without a word of golden.json's."""
    chosen = [parity.configured(case, 2, 2) for case in golden_runs.RANKS]
    assert len(chosen) == 17
    assert sum(c.recipe.kept for c in chosen) >= 4
    assert sum(c.recipe.sharding.update == "differences" for c in chosen) >= 4
    assert sum(c.recipe.remembers for c in chosen) >= 4
    assert sum(bool(c.recipe.phases) for c in chosen) >= 3
    assert any("node" in c.recipe.parts[1:] for c in chosen)
    assert any(c.train.optimizer_place == "host" for c in chosen)
    assert any(c.train.masters == "split" for c in chosen)


def test_a_snapshot_names_the_run_that_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "base.json"
    words = ["recipes", "--cases", "sdp4bit on 2x?", "--against", str(file)]
    assert snapshot.main([*words, "--write"]) == snapshot.main(words) == 0
    held = json.loads(file.read_text())
    held["recipes"]["sdp4bit on 2x4"]["bytes"]["0"]["weights_update"][1] += 1
    file.write_text(json.dumps(held))
    capsys.readouterr()
    assert snapshot.main(words) == 1
    assert capsys.readouterr().out.startswith("/recipes/sdp4bit on 2x4/bytes/0/weights_update: ")
