"""`zpp-lab plan --fastest` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from zpp_lab.cli.main import main
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.load import written
from zpp_lab.config.schema import WIRES, RecipeConfig, RuleConfig
from zpp_lab.tools.plan import planner
from zpp_lab.tools.plan.search import fastest
from zpp_lab.tools.plan.search.shown import plan_overrides, recipe_overrides
from zpp_lab.tools.plan.search.space import Candidate, Knobs, Space
from zpp_lab.train.memory.buffers import GIB

from .problems import GIVEN, base, study

WORDS = ["plan", "model=125m", "cluster=2x2", *GIVEN, "recipe=w8", "--fastest"]
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
    bits = (None, 8, 4, 2)
    monkeypatch.setattr(fastest, "Space", lambda b, extra, studied, _: Space(b, extra, False, bits))
    found = planned(capsys, "recipe=w2")
    recipe = compose(found["chosen"]["overrides"]).recipe
    assert {recipe.wire(w).bits for w in WIRES[:2]} == {8}
    assert {recipe.wire(w).bits for w in WIRES[2:]} <= {None, 8, 4}
    (said,) = [note for note in found["notes"] if "--allow untested" in note]
    assert "weights keep 8 bits or more and gradients 4" in said
    fewer = [row for row in found["rows"] if row["kind"] == "not measured"]
    assert fewer
    assert all("fewer than 8 bits" in row["why"] for row in fewer)
    faster = planned(capsys, "recipe=w2", "--allow", "untested")
    assert compose(faster["chosen"]["overrides"]).recipe.wire("weights_forward").bits == 2
    assert "--allow untested" not in " ".join(faster["notes"])
    assert faster["chosen"]["time"]["step_s"] < found["chosen"]["time"]["step_s"]


def test_untested_bits_are_not_for_a_study(capsys, tmp_path: Path) -> None:
    words = [*WORDS, *LIMITS, "--study", str(study(tmp_path / "study")), "--allow", "untested"]
    assert main(words) == 2
    assert "--allow untested is for a search without --study" in capsys.readouterr().err


def test_the_plan_can_be_pasted(capsys) -> None:
    found = planned(capsys, "--allow", "untested")
    chosen = found["chosen"]
    config = compose(chosen["overrides"])
    assert config.engine.name == "fsdp"
    assert config.recipe.weights.bits == 4
    assert config.model.preset == "125m"
    assert chosen["fits"]
    assert chosen["speed_up"] > 1
    assert not found["loss_considered"]
    assert "Loss was not considered" in " ".join(found["notes"])
    assert [r["kind"] for r in found["rows"]].count("chosen") == 1
    steps = [r["time"]["step_s"] for r in found["rows"]]
    assert steps == sorted(steps)


def test_with_a_study(capsys, tmp_path: Path) -> None:
    folder, path = study(tmp_path / "study"), tmp_path / "next.yaml"
    found = planned(capsys, "--study", str(folder), "--next-study", str(path))
    assert found["chosen"]["ruling"]["arm"] == "w4"
    assert found["max_gap"] == 0.01
    new = [r for r in found["rows"] if r["kind"] == "not measured"]
    assert new
    notes = " ".join(found["notes"])
    assert f"zpp-lab study {path}" in notes
    assert "model tiny (here 125m)" in notes
    made = load_study(str(path))
    assert made.margin == 0.01
    assert {arm.name for arm in made.arms} == {"zero3", *(r["recipe"] for r in new)}
    for arm in made.arms:
        assert compose([*made.overrides, *arm.overrides]).model.preset == "tiny"


def test_where_the_host_is_the_bound_a_note_says_what_its_figures_lack(capsys) -> None:
    fast = ["--machine", "h200", "--link-gbps", "max", "--memory-gib", "80", "--json"]
    assert main([*WORDS, *fast]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["time"]["bound"] == "host"
    lacking = "figures of h200 lack host.block_again_s"
    assert lacking in " ".join(found["notes"])
    assert lacking not in " ".join(planned(capsys)["notes"])  # bound by the link


def test_memory_that_nobody_named_or_saw_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the plain plan: on the terminal, for scripts, and where nothing fits."""
    monkeypatch.setattr(planner, "gpu_memory", lambda: None)
    words = [*WORDS, "--machine", "h200", "--link-gbps", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == 80 * GIB
    assert found["notes"][0] == planner.NO_GPU
    assert planner.NO_GPU not in planned(capsys)["notes"]  # --memory-gib 80
    assert main(words) == 0
    assert planner.NO_GPU in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(planner, "DEFAULT_GIB", 2.0)
    assert main([*words, "train.batch_size=8"]) == 2
    told = capsys.readouterr().err
    assert "no plan fits 2.0 GiB a GPU" in told
    assert told.endswith(f"larger --memory-gib. {planner.NO_GPU}\n")
    monkeypatch.setattr(planner, "gpu_memory", lambda: 2 * GIB)
    assert main([*words, "train.batch_size=8"]) == 2
    assert planner.NO_GPU not in capsys.readouterr().err


def test_the_table(capsys, tmp_path: Path) -> None:
    assert main([*WORDS, *LIMITS, "--study", str(study(tmp_path / "study"))]) == 0
    shown = capsys.readouterr().out
    for text in (
        "chosen",
        "zpp-lab train model=125m",
        "plain ZeRO-3",
        "not measured",
        "by study fake",
    ):
        assert text in shown, shown


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "--fastest needs --machine"),
        (["--machine", "nowhere"], "machine 'nowhere'"),
        (["--machine", "h200"], "2 nodes need --link-gbps"),
        (["--machine", "h200", "--link-gbps", "0"], "a number above 0, or max"),
        ([*LIMITS, "--max-gap", "0.01"], "--max-gap goes with --study"),
        ([*LIMITS, "--memory-gib", "-1"], "use more than 0"),
        ([*LIMITS, "--memory-gib", "2", "train.batch_size=8"], "closest needs"),
    ],
)
def test_mistakes(words: list[str], answer: str, capsys) -> None:
    assert main([*WORDS, *words]) == 2
    assert answer in capsys.readouterr().err


def test_options_need_fastest(capsys) -> None:
    assert main(["plan", "--max-gap", "0.01"]) == 2
    assert "goes with --fastest" in capsys.readouterr().err


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


def test_a_plan_replaces_what_the_user_gave() -> None:
    given = [*GIVEN, "engine=virtual", "recipe=w8", "recipe.weights.bits=2", "model.loss_chunk=64"]
    given += ["recipe.exempt.names=[embed*]", "train.optimizer_state=8bit", "cluster=2x2"]
    config = compose(given)
    recipe = RecipeConfig(exempt=config.recipe.exempt, weights=CodecConfig(bits=4), name="mine")
    candidate = Candidate(recipe, Knobs(True, 0, "bf16"))
    assert compose(plan_overrides(given, config, candidate)) == candidate.config(
        base("recipe.exempt.names=[embed*]", "model.loss_chunk=64")
    )


@pytest.mark.parametrize(
    "text",
    ["8bit", "2x2", "1e5", "-1", ".5", "1_000", "null", "True", "-inf", "a b", "it's", "/x/y"],
)
def test_hydra_reads_a_text_as_it_was_written(text: str) -> None:
    word = f"key={written(text)}"
    value = OverridesParser.create().parse_override(word).value()
    assert not isinstance(value, int | float)
    assert str(value) == text
    assert written("8bit") == "8bit"  # quotes only where they are needed
