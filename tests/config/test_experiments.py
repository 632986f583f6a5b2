"""Whole experiments: as many tokens a step on any hardware, what a referee expects, what fits; and
the walk-through of GUIDE.md, as far as a machine without GPUs goes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.experiments.scripts import ROOT
from zpp_lab.cli.main import main
from zpp_lab.config.compose import EXPERIMENTS, bare_model, compose
from zpp_lab.files import conf_dir
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook

HARDWARE = sorted(p.stem for p in (conf_dir() / "hardware").glob("*.yaml"))
TOKENS = {"pretrain_1b": 2**21, "pretrain_7b": 2**22, "pretrain_13b": 2**22}
MINE = ["model.path=MODEL", "data.path=RECORDS"]


@pytest.mark.parametrize("name", EXPERIMENTS.values())
def test_settings_are_a_referees_whatever_it_runs_on(name: str) -> None:
    more = MINE if name == "finetune_30b" else []
    for hardware in ("", *HARDWARE):
        words = [f"experiment={name}", *more, *([f"hardware={hardware}"] if hardware else [])]
        config = compose(words)
        assert config.tokens_per_step == TOKENS.get(name, 2**18)
        train = config.train
        assert (train.param_dtype, train.reduce_dtype) == ("bf16", "bf16")
        assert (train.beta1, train.beta2, train.clip, train.eps) == (0.9, 0.95, 1.0, 1e-8)
        assert train.weight_decay == (0.1 if name in TOKENS else 0.0)
        assert train.optimizer_state == "fp32"
        assert 0 < train.warmup_steps < train.steps / 10
        assert config.data.seq_len == 2048
        assert config.engine.name == ("virtual" if hardware == "1gpu" else "fsdp")


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(ValueError, match="batch_size=3"):
        compose(["experiment=pretrain_13b", "train.batch_size=3"])
    assert compose(["experiment=pretrain_13b", "cluster=1x4"]).tokens_per_step == 2**22
    with pytest.raises(ValueError, match="hardware"):
        compose(["experiment=pretrain_13b", "hardware=8gpus", "cluster=1x4"])


def test_a_shape_alone_is_no_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=13b", "--dry-run"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("model=13b ")
    assert "experiment=pretrain_13b" in line
    for words in (["model=10m"], ["model=13b", "train.lr=1"], ["experiment=pretrain_13b"]):
        assert not bare_model(words)
    assert main(["train", "experiment=pretrain_13b", "hardware=slurm"]) == 2
    assert "hardware=slurm submits jobs: add -m" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pretrain_1b", "pretrain_7b", "pretrain_13b"])
def test_pretraining_fits_eight_gpus_of_80_gib(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"experiment={name}", "hardware=8gpus", "--gpu-gib", "80", "--json"]
    assert main(["plan", *words]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize(
    ("name", "ranks", "host"), [("finetune_13b_1gpu", 1, 116), ("finetune_32b_2gpus", 2, 232)]
)
def test_finetuning_of_more_than_the_gpus_hold(
    name: str, ranks: int, host: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On GPUs of 80 GiB, with as much host memory as can be pinned."""
    words = [f"experiment={name}", "data.path=RECORDS", "model.path=MODEL"]
    words += ["data.tokenizer=bytes", "data.tokenizer_path=null"]
    config = compose(words)
    assert config.tokens_per_step == 2**16
    assert config.cluster.world == ranks
    planned = Outlook.of(config, 80 * GIB)
    assert planned.fits
    assert planned.parameters * 10 / ranks > 80 * GIB  # bytes with 8-bit moments alone
    assert ranks * planned.estimate.host < host * GIB


@pytest.mark.slow
def test_the_walk_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that look are run; those that start a study are run as its dry run."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "GUIDE.md").read_text().partition("## 13B on Slurm")[2].partition("\n## ")[0]
    lines = re.findall(r"^zpp-lab (.*?)(?:\s+#.*)?$", page, re.M)
    assert len(lines) == 8
    for words in map(shlex.split, lines):
        if words[0] in ("prepare", "report") or "--watch" in words:  # what is not here yet
            continue
        starts = words[0] == "study" and "--dry-run" not in words
        assert main([*words, *["--dry-run"] * starts]) == 0
        said = capsys.readouterr().out
        if words[0] == "study":
            for line in ("nodes=1", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu"):
                assert f"#SBATCH --{line}" in said
            assert ("1 run" if "--alone" in words else "21 runs") in said
    assert not list(tmp_path.iterdir())
