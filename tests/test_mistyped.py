"""Every path that a user can mistype, command by command: exit code 2, at once, with the fix."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.runs import small, tear
from zpp_lab.cli import main
from zpp_lab.locks import hold
from zpp_lab.trainer import run

LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1}
HERE = {"engine.device=cpu", "tracking.wandb=off", "data.path=texts", "data=text"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a finished run, a model, an empty folder and a file."""
    place = tmp_path_factory.mktemp("place")
    run(small(place, f"run.dir={place / 'runs' / 'good'}", "train.steps=3"))
    (place / "models" / "llama").mkdir(parents=True)
    (place / "models" / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (place / "empty").mkdir()
    (place / "afile").write_text("hello\n")
    (place / "cut").mkdir()
    cut = shutil.copytree(
        place / "runs/good/checkpoints/step-00000003", place / "cut/step-00000003"
    )
    tear(Path(cut))
    return place


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("zpp_lab.hub.reachable", lambda: pytest.fail("the Hub was asked"))


TRAIN = [
    ("data.path=textz", "data.path=textz: no such file or folder (did you mean texts?)"),
    ("data.path=empty", "name the folder that has some"),
    ("data=stdlib", "data.path=texts: data=stdlib does not read it; add data=text"),
    ("data=jsonl", "no *.jsonl file in there"),
    ("data=installation data.path=textz", "no such folder (did you mean texts?)"),
    ("data=hf data.path=./textz", "did you mean texts?"),
    ("data.tokenizer=hf data.tokenizer_path=textz", "name a tokenizer.json or its folder"),
    ("data.tokenizer=hf data.tokenizer_path=empty", "no tokenizer.json there"),
    ("data.cache_dir=afile/c", "set data.cache_dir to another folder"),
    ("model.path=modles/llama model.weights=pretrained", "did you mean models/llama?"),
    ("model.path=models/llama model.weights=pretrained", "no .safetensors file: fetch it whole"),
    ("model=hf model.path=models/lama", "did you mean models/llama?"),
    ("model=hf model.path=models", "has no config.json (did you mean models/llama?)"),
    ("model=hf model.path=./afile", "a file, not a folder"),
    ("model=hf model.path=~/no/such/model", "no such folder"),
    ("model.start=runs/goood", "did you mean runs/good?"),
    ("model.start=runs", "did you mean runs/good?"),
    ("run.start_from=runs/good", "did you mean runs/good/checkpoints/step-00000003?"),
    ("run.start_from=runs/good/checkpoints/step-3", "no such checkpoint"),
    ("run.start_from=afile", "is no checkpoint"),
    ("run.start_from=cut/step-00000003", "is damaged or not whole"),
    ("run.dir=afile", "a file of that name is there: name another one"),
    ("run.dir=afile/x", "a part of this path is a file: name another one"),
]


@pytest.mark.parametrize(("words", "answer"), TRAIN)
def test_train(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *sorted(HERE), "run.dir=runs/new", *words.split()]) == 2
    assert answer in capsys.readouterr().err
    assert not Path("runs/new/config.yaml").exists()


OTHERS = [
    ("report runz", "no such folder (did you mean runs?)"),
    ("report afile", "a file, not a folder"),
    ("report empty", "no runs in or below it"),
    ("report runs --machine nope", "no such file; give one that"),
    ("export runs runz --out x.csv", "did you mean runs?"),
    ("export runs --out afile/x.csv", "name another one"),
    ("export runz --to hf --out o", "no such folder (did you mean runs?)"),
    ("export runs --to hf --out o", "did you mean runs/good?"),
    ("export runs/good --to hf --out afile/x", "a part of this path is a file"),
    ("export runs/good --to hf --out empty", "name a new folder, or delete it"),
    ("export runs/good runs --to hf --out o", "takes one run's folder, not 2"),
    ("export empty --to peft --out o", "it has no config.yaml; name one"),
    ("evaluate runz", "did you mean runs?"),
    ("evaluate runs", "did you mean runs/good?"),
    ("evaluate runs/good --out afile/x.csv", "name another one"),
    ("sync runz", "did you mean runs?"),
    ("sync empty", "name a run's folder"),
    ("dashboard runz", "or a study's folder: did you mean runs?"),
    ("dashboard --apply nope.json", "no such file or folder"),
    ("dashboard smoke --out afile/x.json", "a part of this path is a file"),
    ("study smoke --dir afile/x --dry-run", "afile is a file: give the study a folder"),
    ("study smoke --dir runs/good --dry-run", "holds a single run"),
    ("study smoke --watch --dir runz", "did you mean runs?"),
    ("plan model=hf model.path=models/lama", "did you mean models/llama?"),
]


@pytest.mark.parametrize(("words", "answer"), OTHERS)
def test_other_commands(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert answer in capsys.readouterr().err
    assert not Path("o").exists()


def test_a_study_looks_before_its_first_run(place: Path, capsys: pytest.CaptureFixture) -> None:
    text = "\n".join(
        (
            "name: mine",
            "question: Does it?",
            "seeds: [1, 2]",
            "overrides: [data=text, data.path=textz, engine.device=cpu]",
            "arms: [{name: zero3, overrides: [recipe=zero3]}, {name: w4, overrides: [recipe=w4]}]",
        )
    )
    Path("mine.yaml").write_text(text)
    assert main(["study", "mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.count("did you mean texts?") == 1
    assert "study mine, zero3, w4: data.path=textz" in said
    assert not Path("runs/mine").exists()


def test_a_study_file_with_a_mistake_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("half.yaml").write_text("name: half\nquestion: Does it?\n")
    assert main(["study", "half.yaml"]) == 2
    said = capsys.readouterr().err
    assert "half.yaml: arms=null: use a list" in said
    assert "half.yaml: seeds: missing" in said


def test_what_a_run_no_longer_reads_may_be_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run is shown again, though the checkpoint that it began with is not there."""
    config = small(Path.cwd(), "run.dir=runs/second", "train.steps=2")
    words = [
        f"{k}={getattr(config.model, k)}" for k in ("dim", "layers", "heads", "kv_heads", "ffn")
    ]
    words = [f"model.{word}" for word in words]
    words += ["data.seq_len=16", "data.heldout_every=2", "train.steps=2", "train.batch_size=2"]
    words += [*sorted(HERE), "train.eval_tokens=64", "run.dir=runs/second", "engine.threads=1"]
    first = shutil.copytree("runs/good/checkpoints/step-00000003", "first")
    assert main(["train", *words, "run.start_from=first"]) == 0
    shutil.rmtree(first)
    assert main(["train", *words, "run.start_from=first"]) == 0
    assert "trained before" in capsys.readouterr().out


def test_two_starts_of_one_run_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/twice")
    folder.mkdir()
    with hold(folder):
        assert main(["train", *sorted(HERE), "run.dir=runs/twice"]) == 2
    assert "a run is at work here already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "change its permissions"),
        (errno.EROFS, "change its permissions"),
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EISDIR, "name a file"),
    ],
)
def test_each_error_of_the_system_names_a_fix(
    number: int, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr("zpp_lab.doctor.doctor", fail)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert "some/file: " in said
    assert fix in said


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train data.path=texts run.dir=runs/new data.cache_dir=small", "make room there"),
        ("export runs/good --to hf --out o", "make room there"),
        ("export runs --steps --out x.csv", "cannot write x.csv: File too large"),
    ],
)
def test_a_disk_that_takes_no_more(words: str, answer: str, capsys: pytest.CaptureFixture) -> None:
    """A limit on the size of files stands for the disk's end."""
    command, *rest = words.split()
    settings = sorted(HERE) if command == "train" else []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        code = main([command, *settings, *rest])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    said = capsys.readouterr().err
    assert (code, answer in said) == (2, True), said
    assert not Path("o").exists()
    assert not Path("x.csv").exists()


def test_an_error_is_not_hidden_by_a_folder_that_takes_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "cannot write failure.json")

    monkeypatch.setattr("zpp_lab.trainer.write_failure", refuse)
    with pytest.raises(ValueError, match="did you mean texts"):
        run(small(Path.cwd(), "run.dir=runs/new", "data.path=textz"))
    assert "failure.json" in capsys.readouterr().err
