"""experiments/finetune_weights/rounded.py: the baseline's weights with every arm's codec."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded
from tests.small_runs import small
from tests.tools.export.checkpoints import heldout_losses, leave
from zpp_lab.models.loss import mean_loss

SCRIPT = "experiments/finetune_weights/rounded.py"
NAMED = ("recipe=base", "recipe.weights.bits=4")
ARMS = {  # how it is trained
    "zero3": ("recipe=zero3",),
    "w8": ("recipe=w8",),
    "w4": ("recipe=w4",),
    "w4_block64_asymmetric": (
        *NAMED,
        "recipe.weights.block_size=64",
        "recipe.weights.symmetric=false",
    ),
    "w4_hadamard64": (*NAMED, "recipe.weights.hadamard=64"),
    "w4_stochastic": (*NAMED, "recipe.weights.rounding=stochastic"),
    "w4_inner": (*NAMED, 'recipe.exempt.names=["embed*","head*"]'),
    "w4_ruled": (*NAMED, 'recipe.rules=[{name: "embed*", exempt: true}]'),
    "g4": ("recipe=base", "recipe.grads.bits=4"),
    "broken": ("recipe=broken",),
}
LEFT_OUT = {"zero3", "w4_inner", "w4_ruled", "g4", "broken"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A study of sixteen-bit weights on 2 × 2 ranks whose arms all end with the same masters, and
    what each arm's own gather makes of them, held out."""
    folder = tmp_path_factory.mktemp("weights")
    study, losses = folder / "study", {}
    for i, (name, recipe) in enumerate(ARMS.items()):
        run = study / name / "seed1"
        run.mkdir(parents=True)
        where = (f"run.dir={run}", "cluster=2x2", "train.param_dtype=bf16", "model.dim=64")
        config = small(folder, *recipe, *where)
        losses[name] = mean_loss(heldout_losses(leave(config), config))
        (run / "summary.json").write_text(json.dumps({"heldout_loss": 1.0 + i}))
    (study / "w8" / "seed1" / "summary.json").unlink()  # not finished
    return study, losses


def test_what_rounding_gives_is_what_the_wire_gives(
    trained: tuple[Path, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, losses = trained
    out = tmp_path / "rounded.csv"
    monkeypatch.setattr(sys, "argv", ["rounded.py", str(study), str(out), "--seeds", "1"])
    loaded(SCRIPT).main()
    rows = {row["arm"]: row for row in csv.DictReader(out.open())}
    assert set(rows) == set(ARMS) - LEFT_OUT - {"w8"}
    assert f"{study}/w8/seed1 has not finished" in capsys.readouterr().err
    own = {name: float(row["heldout_loss"]) for name, row in rows.items()}
    assert own == {name: 1.0 + list(ARMS).index(name) for name in rows}
    assert {float(row["baseline_loss"]) for row in rows.values()} == {losses["zero3"]}
    rounded = {name: float(row["rounded_loss"]) for name, row in rows.items()}
    assert rounded.pop("w4_stochastic") == rounded["w4"] != losses["w4_stochastic"]
    assert rounded == {name: losses[name] for name in rounded}
    assert len({*rounded.values(), losses["zero3"]}) == 4
    text = "bits=4,block_size=64,symmetric=false,rounding=nearest"
    assert rows["w4_block64_asymmetric"]["codec"] == text
    assert {row["seed"] for row in rows.values()} == {"1"}
