"""`zpp-lab plan --fastest` as a user types it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.cli.main import main
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import RecipeConfig, RuleConfig
from zpp_lab.config.wires import wires_among
from zpp_lab.tools.plan.cost.machine import Bus, load_machine
from zpp_lab.tools.plan.search import command, fastest
from zpp_lab.tools.plan.search.shown import recipe_overrides
from zpp_lab.tools.plan.search.space import Space
from zpp_lab.train.memory.buffers import GIB

from .problems import GIVEN, study

FEW = "model.layers=2"  # a plan of them is made in half the time
WORDS = ["plan", "model=125m", FEW, "cluster=2x1", *GIVEN, "recipe=w8", "--fastest"]
LIMITS = ["--machine", "h200", "--link-gbps", "1", "--memory-gib", "80"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bits to choose from: nothing here asks for more."""
    monkeypatch.setattr(
        fastest, "Space", lambda b, extra, studied, _: Space(b, extra, studied, (None, 4))
    )


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*WORDS, *LIMITS, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_without_evidence_the_bits_stay_mild(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights at 8 bits or more and gradients at 4, whatever would be faster or the user has."""
    bits = (8, 2)
    monkeypatch.setattr(fastest, "Space", lambda b, extra, studied, _: Space(b, extra, False, bits))
    found = planned(capsys, "recipe=w2")
    recipe = compose(found["chosen"]["overrides"]).recipe
    assert {recipe.wire(w).bits for w in wires_among()[:2]} <= {None, 8}
    assert {recipe.wire(w).bits for w in wires_among()[2:]} <= {None, 8, 4}
    (said,) = [note for note in found["notes"] if "--allow untested" in note]
    assert "weights keep 8 bits or more and gradients 4" in said
    fewer = [row for row in found["rows"] if row["kind"] == "not measured"]
    assert fewer
    assert all("fewer than 8 bits" in row["why"] for row in fewer)
    faster = planned(capsys, "recipe=w2", "--allow", "untested")
    assert compose(faster["chosen"]["overrides"]).recipe.wire("grads_inter").bits == 2
    assert "--allow untested" not in " ".join(faster["notes"])
    assert faster["chosen"]["time"]["step_s"] < found["chosen"]["time"]["step_s"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_search_says_how_far_it_is(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr; on a terminal in one line, which is gone at the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(command.time, "monotonic", count(step=20).__next__)
    assert main([*WORDS, *LIMITS, "--json"]) == 0
    out, err = capsys.readouterr()
    plans = json.loads(out)["plans"]
    shown = re.findall(rf"([\d,]+) of {plans:,} plans", err)
    done = [int(number.replace(",", "")) for number in shown]
    assert done == sorted(done)
    assert done[0] == 0
    assert plans / 2 < done[-1] < plans
    assert err.endswith("\x1b[K" if terminal else "predicted\n")
    assert (err.count("\n") == 0) == terminal


def test_with_a_study(capsys, tmp_path: Path) -> None:
    found = planned(capsys, "--study", str(study(tmp_path / "study")))
    assert found["chosen"]["ruling"]["arm"] == "w4"
    assert found["max_gap"] == 0.01
    assert [r for r in found["rows"] if r["kind"] == "not measured"]
    assert "model tiny (here 125m)" in " ".join(found["notes"])


def test_plans_fit_the_memory_of_the_host(capsys, tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    replace(load_machine("h200"), bus=Bus(50e9, 50e9, 90e9, 0.5)).save(path)
    words = ["--machine", str(path), "engine.place=host", "train.masters=split"]
    unknown = planned(capsys, *words)
    assert "engine.host_gib" in " ".join(unknown["notes"])
    most = max(row["host"] for row in unknown["rows"])
    found = planned(capsys, *words, f"engine.host_gib={most / GIB}")  # of which a part is pinned
    assert 0 < found["chosen"]["host"] <= found["host_limit"] < most
    assert any(row["host"] == most and not row["fits"] for row in found["rows"])
    assert main([*WORDS, *LIMITS, *words, "engine.host_gib=0.001"]) == 2
    assert "engine.host_gib" in capsys.readouterr().err


def test_a_recipe_with_error_feedback_is_not_predicted(capsys) -> None:
    found = planned(capsys, "recipe=loco", "--allow", "untested")
    assert [note for note in found["notes"] if "recipe loco" in note and "memory.kind" in note]


RULE = RuleConfig(name="*.o.weight", exempt=True, set=CodecConfig(bits=8))
RECIPES = [
    RecipeConfig(),
    RecipeConfig(name="zeropp", secondary=True, hops=2, weights=CodecConfig(bits=8)),
    RecipeConfig(name="it's, one", exempt=ExemptConfig(names=["embed*", "a b"]), rules=[RULE]),
    RecipeConfig(name="x", grads=CodecConfig(codec="mine", options={"radius": 2, "kind": "a"})),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_overrides_compose_to_the_recipe(recipe: RecipeConfig) -> None:
    assert compose(recipe_overrides(recipe)).recipe == recipe
