"""Known before work starts: what a recipe asks for and this model, cluster or machine cannot give
is one line that names the fix, before a token is read or a file written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch import nn

from tests.models.hf_cases import settings as hf_settings
from tests.small_runs import SHAPE, corpus, small
from tests.train.test_finetune_example import write_model
from zpp_lab import api
from zpp_lab.cli.main import main
from zpp_lab.codecs import RawCodec
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.compose import compose
from zpp_lab.config.model import LoraConfig
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import plan_of
from zpp_lab.files import conf_dir
from zpp_lab.models import param_class
from zpp_lab.train import trainer
from zpp_lab.train.inputs import check_run
from zpp_lab.train.trainer import run

ALL = "recipe.exempt.names=['*']"
RULE = "recipe.rules=[{name: '*', wires: [weights_backward], exempt: true}]"
ABSENT = "recipe.rules=[{name: '*', wires: [grads_inter], set: {bits: 4}}]"
REAL = ["engine=fsdp", "engine.device=cpu"]
LESS_THAN_ASKED = [
    (["recipe=w4", ALL], "w4, weights_forward: .* by recipe.exempt.names"),
    (
        ["recipe=w4", "recipe.exempt.below_numel=100000000"],
        "by recipe.exempt.below_numel=100000000",
    ),
    (["recipe=zeropp", "recipe.exempt.max_ndim=2"], "by recipe.exempt.max_ndim=2"),
    (["recipe=qsdp", RULE], "qsdp, weights_backward: .*by recipe.rules"),
    (["recipe=zero3", ABSENT], "grads_inter: "),
    (["recipe=w4", "recipe.exempt.names=['embd*']"], "'embd.*' .*: embed.weight"),
    (["recipe.rules=[{name: 'layer.0.*', exempt: true}]"], r"rules\[0\].name: .* layers.0."),
    (["recipe.rules=[{name: 'head*', min_numel: 1000000}]"], r"rules\[0\] .*min_numel"),
    (["recipe=w4", "recipe.weights.codec=magic"], "codec 'magic': .*block"),
    (["recipe=w4", "recipe.weights.options={radius: 2}"], "codec block .*'radius'"),
    (["recipe.rules=[{set: {codec: magic}}]"], "codec 'magic'"),
    (["recipe=w4", "cluster.nodes=1", "cluster.gpus_per_node=1"], "recipe w4.*recipe=zero3"),
    (["recipe.grads_intra.bits=4"], "recipe.grads"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which no run may begin: its text may not be read either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "open_data", lambda cfg: pytest.fail("read the text"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    corpus(tmp_path)
    return tmp_path


def settings(*overrides: str) -> list[str]:
    return [*SHAPE, "data.path=texts", "data.cache_dir=cache", *overrides]


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The line with which a command refuses; it leaves nothing behind."""
    capsys.readouterr()
    before = sorted(Path().rglob("*"))
    assert main(list(command)) == 2
    assert sorted(Path().rglob("*")) == before
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("asked", "said"), LESS_THAN_ASKED)
def test_less_than_a_recipe_asks_for_is_refused(
    asked: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = settings(*asked)
    commands = [["train", *own]]
    if asked is LESS_THAN_ASKED[0][0]:  # and every other way to a run
        commands += [["train", *own, *more] for more in (REAL, ["--dry-run"])] + [["plan", *own]]
        with pytest.raises(ValueError, match=said):
            run(compose([*own, "run.dir=run"]))
    for command in commands:
        assert re.search(said, refused(capsys, *command))


def test_a_study_refuses_what_its_runs_would(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = [
        {"name": "zero3", "overrides": ["recipe=zero3"]},
        {"name": "void", "overrides": ["recipe=w4", ALL]},
        {"name": "magic", "overrides": ["recipe=base", "recipe.grads.codec=magic"]},
    ]
    study = {"name": "s", "question": "?", "baseline": "zero3", "seeds": [1], "arms": arms}
    Path("s.yaml").write_text(yaml.safe_dump(study | {"overrides": settings()}))
    for more in ([], ["--dry-run"], ["--dry-run", "--machine", "h200"]):
        capsys.readouterr()
        assert main(["study", "s.yaml", *more]) == 2
        void, magic = capsys.readouterr().err.strip().splitlines()
        assert "s, void: recipe w4, weights_forward" in void
        assert "s, magic: recipe base, grads_intra: codec 'magic'" in magic
    study["arms"] = arms[:1]
    Path("s.yaml").write_text(yaml.safe_dump(study | {"overrides": settings()}))
    assert "tracking.wandb=online" in refused(capsys, "study", "s.yaml", "tracking.wandb=online")
    assert not Path("runs").exists()


def test_shard_refuses_a_wire_without_its_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)
    recipe = api.recipe("w4", ALL)
    with pytest.raises(ValueError, match=r"weights_forward.*recipe\.exempt\.names"):
        api.shard(model, recipe, cluster, units=list(model), gather="flat")


def test_what_is_quantized_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each wire's bytes: counted from the layouts, in the dry run and in the summary."""
    config = small(tmp_path, "recipe=w4", "train.steps=1", "train.eval_every=1")
    plan, told = plan_of(config), plan_of(config).quantized_share()
    root = plan.units[-1]
    assert not root.unit.reshard
    blocks = [s for u in plan.units[:-1] for s in u.backward.segments]
    made = sum(s.nbytes for s in blocks if "norm" not in s.name)
    assert told["weights_backward"] == pytest.approx(made / sum(s.nbytes for s in blocks))
    assert 0.5 < told["weights_backward"] < 1
    assert told["grads_intra"] == told["grads_inter"] == 0
    run(config)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["quantized_share"] == told
    assert main(["train", *settings("recipe=w4"), "--dry-run"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"# quantized, .*: weights [\d./]+%, gradients 0%", last)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "opt", "qwen2", "gpt2"])
def test_default_exemptions_serve_every_family(kind: str) -> None:
    """Of a frozen base the embeddings and heads, whatever they are called, though no family has all
    of the default's names; a list of one's own must match name by name."""
    q4 = LoraConfig(rank=2, base_codec=CodecConfig(bits=4))
    config = replace(Config(), model=hf_settings(kind, {"vocab_size": 256}, lora=q4, start="a"))
    units = plan_of(config).units
    raw = {s.name for u in units for s in u.stored.segments if isinstance(s.codec, RawCodec)}
    matrices = {p.name for u in units for p in u.unit.parameters if len(p.shape) > 1}
    outer = {n for n in matrices if param_class(n) in ("embedding", "head")}
    assert len(outer) >= 1
    assert raw & matrices == outer
    mine = replace(q4, base_exempt=ExemptConfig(names=["embed*"]))
    config = replace(config, model=replace(config.model, lora=mine))
    with pytest.raises(ValueError, match=r"base_exempt\.names.*embed\*"):
        plan_of(config)


@pytest.mark.parametrize("name", ["finetune", "pretrain_10m", "pretrain_350m", "smoke"])
def test_shipped_experiments_can_start(name: str, here: Path) -> None:
    """Alone and with another recipe, as an arm of a study."""
    words = [f"experiment={name}"]
    if name == "finetune":
        write_model(here / "model")
        (here / "records.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n')
        words += ["model.path=model", "data.path=records.jsonl"]
    check_run(compose(words))
    arm = compose([*words, "recipe=w4"])
    assert arm.recipe == compose(["recipe=w4"]).recipe
    check_run(arm)


@pytest.mark.parametrize("name", sorted(p.stem for p in (conf_dir() / "recipe").glob("*.yaml")))
def test_shipped_recipes_exempt_vectors_alone(name: str) -> None:
    """`broken` has no exemption; whoever changes what another one exempts changes its results."""
    plan = plan_of(compose([f"recipe={name}"]))
    wires = [w for w in plan.quantized_share() if plan.recipe.asks(w)]
    for wire in ("weights_forward", "weights_update") if plan.recipe.kept else ("weights_forward",):
        update = wire == "weights_update"
        layouts = [u.update if update else u.forward for u in plan.units]
        sent = {s.name: s.codec for layout in layouts for s in layout.segments}
        raw = {n for n, codec in sent.items() if type(codec).__name__ == "RawCodec"}
        vectors = {n for n in sent if "norm" in n}
        assert raw == (set() if name == "broken" else vectors if wire in wires else set(sent))
