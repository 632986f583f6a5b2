"""Bits by class: least cost within the bytes, a recipe that says the same, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.small_runs import small
from tests.tools.export.checkpoints import leave
from zpp_lab.cli.main import main
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, RecipeConfig
from zpp_lab.runs.checkpoint.read import newest
from zpp_lab.tools.evaluate import Bench
from zpp_lab.tools.export.wire import WireWeights
from zpp_lab.tools.tune import Choice, Class, floored, spend, summary, tune


@st.composite
def classes(draw: st.DrawFn) -> list[list[Choice]]:
    sizes = st.integers(1, 9)
    one = st.builds(lambda n, c: Choice(CodecConfig(bits=4), n, 0.0, c / 4), sizes, sizes)
    return draw(st.lists(st.lists(one, min_size=1, max_size=4), min_size=1, max_size=4))


@given(classes(), st.integers(1, 40))
def test_no_other_bundle_within_the_budget_costs_less(own: list[list[Choice]], budget: int) -> None:
    def told(bundle: tuple[Choice, ...]) -> tuple[float, int]:
        return sum(c.cost for c in bundle), sum(c.nbytes for c in bundle)

    fit = [told(b) for b in product(*own) if told(b)[1] <= budget]
    found = spend(own, budget)
    assert (found and told(tuple(found))) == (min(fit) if fit else None)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    config = small(
        tmp_path,
        "cluster=2x2",
        "recipe.exempt.names=[embed*]",
        "recipe.rules=[{name: '*.w_down.*', ndim: 2, exempt: true}]",
        "train.param_dtype=fp32",
    )
    leave(config)
    return Path(config.run.dir)


def test_the_recipe_sends_what_was_chosen(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "mine.yaml"
    words = ["tune", str(trained), "--bits", "5", "--blocks", "16", "64", "--out", str(out)]
    assert main(words) == 0
    recipe = load(RecipeConfig, yaml.safe_load(out.read_text()))
    assert recipe.name == "mine"
    tuned = tune(trained, 5, "mine", blocks=(16, 64))
    assert recipe == tuned.recipe
    run = small(tmp_path, "cluster=2x2")
    sent = WireWeights(run, newest(trained))
    made = Recipe(recipe, ClusterConfig(2, 2))
    codecs = {n: made.codec("weights_backward", sent.parameter(n)) for n in sent.shapes}
    numels = {n: sent.parameter(n).shard_numel for n in sent.shapes}
    nbytes = sum(4 * codecs[n].nbytes(numels[n]) for c in tuned.classes for n in c.names)
    assert nbytes == round(tuned.bits * tuned.numel / 8) <= tuned.budget
    raw = {n for n, codec in codecs.items() if not hasattr(codec, "block_size")}
    assert raw == {n for n in codecs if any(word in n for word in ("norm", "embed", "w_down"))}


def test_a_recipe_is_found_where_tune_has_written_it(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", str(trained), "--bits", "5", "--blocks", "64", "--among", "4", "--out"]
    for out, use in (("conf/recipe/mine.yaml", ""), ("own/recipe/yours.yaml", "--config-dir own ")):
        assert main([*words, out]) == 0
        name = Path(out).stem
        used = f"{use}recipe={name}"
        assert used in capsys.readouterr().out
        assert main(["train", *used.split(), "--dry-run"]) == 0
        assert f"name: {name}" in capsys.readouterr().out
    assert main([*words, "conf/recipe/w4.yaml"]) == 2  # which would mean zpp_lab's own
    assert not Path("conf/recipe/w4.yaml").exists()


def test_levels_for_normal_numbers_are_among_the_choices(trained: Path) -> None:
    tuned = tune(trained, 4, among=(2,), blocks=(64,))
    assert "normal" in {choice.codec.codec for choice in tuned.chosen.values()}
    assert any("normal levels" in choice.text for choice in tuned.chosen.values())
    assert f"{tuned.bits:.3f} bits" in summary(tuned)


def test_more_bytes_never_cost_more(trained: Path) -> None:
    costs = [tune(trained, bits, blocks=(32, 64)).cost for bits in (4.5, 6.0, 9.0)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--bits", "1.5"], "--bits"),
        (["--bits", "4", "--among", "5"], "2, 3, 4, 6, 8"),
        (["--bits", "4", "--blocks", "100"], "16, 32"),
        (["--bits", "4", "--out", "mine.json"], "ends with .yaml"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(
    trained: Path,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Bench, "of", lambda *_: pytest.fail("the run was measured"))
    out = [] if "--out" in words else ["--out", str(tmp_path / "mine.yaml")]
    assert main(["tune", str(trained), *words, *out]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


def test_weights_that_are_not_finite_are_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(self: Bench, model: nn.Module, *_: object) -> None:
        for p in model.parameters():
            p.data.fill_(float("nan"))

    monkeypatch.setattr(Bench, "fill", diverged)
    monkeypatch.setattr(Bench, "loss", lambda *_: pytest.fail("the run was measured"))
    with pytest.raises(ValueError, match=r"\.weight"):
        tune(trained, 4)


def test_a_recipe_that_tune_did_not_write_stays(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\n")
    assert main(["tune", str(trained), "--bits", "4", "--out", str(mine)]) == 2
    assert f"--out {mine}" in capsys.readouterr().err
    assert mine.read_text() == "name: mine\n"


def test_a_class_without_a_rise_counts_as_the_least_sensitive_of_the_others() -> None:
    codec = CodecConfig(bits=4)

    def made(name: str, slope: float) -> Class:
        rises = (slope, slope) if slope else (-1e-4, 0.0)
        choices = (Choice(codec, 8, 0.5, slope * 0.5),)
        return Class(name, (name,), 16, rises, slope, choices)

    found = floored([made("a", 3.0), made("b", 0.0), made("c", 2.0)])
    assert [(c.slope, c.choices[0].cost) for c in found] == [(3.0, 1.5), (2.0, 1.0), (2.0, 1.0)]
