"""Every command that README, GUIDE and the experiments' scripts and pages give exists.

Scripts and the pages' command lines run in bash with recorders in place of python3, torchrun
and zpp-lab. What was recorded is then read as the command would read it: options by its own
parser, settings by Hydra. So a name that is gone fails here, not on a machine with GPUs. A zpp-lab
command inside a sentence is read in the same way, without bash. Commands that reports have made
(report.md) are those of their runs' commit, and are not read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.experiments.scripts import ROOT, loaded
from zpp_lab.cli.adding import check_words
from zpp_lab.cli.main import _parser
from zpp_lab.codecs.kernels import build
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config import compose
from zpp_lab.config.schema import Config
from zpp_lab.study.run.plan import matching, run_overrides
from zpp_lab.tools.bench.step import arms as step_arms
from zpp_lab.tools.bench.step.run import limits
from zpp_lab.tools.plan.cost.step import _check

PAGES = sorted(ROOT.glob("experiments/**/[A-Z]*.md"))
RECORDED = ("python", "python3", "torchrun", "zpp-lab", "compute-sanitizer", "ncu", "nvidia-smi")
# A program that says what it was told. Programs on standard input are real.
RECORDER = """#!/bin/bash
if [ "$1" = - ]; then exec "$REAL_PYTHON" "$@"; fi
printf '%s\\0' "${0##*/}" "$@" > "$(mktemp "$RECORD/XXXXXXXX")"
"""
# Of scripts that no page starts, or that can be told more than the pages show.
MORE = [
    "bash experiments/baseline/first.sh OUT 13b zero3",
    "bash experiments/bits/controls.sh OUT",
    "bash experiments/bits/run.sh OUT",
    "bash experiments/kernels/run.sh OUT",
    "bash experiments/qexport/run.sh OUT --seeds 1 --no-folders",
    "bash experiments/virtual/run.sh OUT",
    "bash experiments/parity/gpu.sh OUT bench table cost profile race big kills kernels update",
]
# zpp-lab commands in sentences that are no whole command, and why
PARTIAL = {
    "zpp-lab bench step --share-gpus": "an option, whose command is given elsewhere on the page",
    "zpp-lab emulate --share-gpus": "an option of a command that the page's script gives",
    "zpp-lab export --to hf --quantized": "options, whose command is given elsewhere on the page",
    "zpp-lab mps -- bash": "what starts the page's script",
    "zpp-lab plan --machine": "an option, whose command is given elsewhere on the page",
    "zpp-lab study --dry-run": "an option of any study",
}
composed = cache(lambda words: compose.compose(list(words)))  # a fifth of a second each


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_arms, "compose", lambda words: composed(tuple(words)))


def shell_lines(page: Path) -> list[str]:
    """The page's commands: lines of its indented and fenced blocks, continued ones joined."""
    joined = re.sub(r" \\\n\s+", " ", page.read_text())
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", joined, re.M | re.S))
    lines = [line.strip() for line in joined.splitlines() if line.startswith("    ")]
    lines += [line.strip() for line in blocks.splitlines()]
    lines = [
        line for line in lines if not re.search(r"/(wheels|iproute|carry)\.sh", line)
    ]  # download
    start = re.compile(r"(\w+=\S+ )*(bash experiments/|zpp-lab |python experiments/|torchrun )")
    return [re.sub(r"\s+#.*", "", line) for line in lines if start.match(line)]


def fenced(page: Path) -> list[str]:
    """The zpp-lab lines of the page's shell blocks, each with the variables set before it. Left
    out: words for Hydra itself, and files that the page's other lines make."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S):
        lines = re.sub(r" \\\n\s+", " ", block).splitlines()
        own = "".join(f"{line}; " for line in lines if re.match(r'\w+="', line))
        found += [own + line for line in lines if line.startswith("zpp-lab ")]
    return [
        line
        for line in found
        if not re.search(r" -m | --version| hydra\.| NAME\b|my_quantizer|--study ", line)
    ]


def sentences() -> list[str]:
    """zpp-lab commands in the pages' sentences, of more than the subcommand's name."""
    found = [
        s for page in PAGES for s in re.findall(r"(?<!`)`(zpp-lab [^`\n]+)`", page.read_text())
    ]
    return sorted(set(found))


@pytest.mark.parametrize("line", sentences())
def test_a_command_in_a_sentence_is_one(line: str) -> None:
    words = shlex.split(line)[1:]
    assert words[0] in _parser()[1].names, words[0]
    named = 2 if words[0] == "bench" else 1  # words that name the command
    if words[0] == "bench":
        assert importlib.util.find_spec(f"zpp_lab.tools.bench.{words[1]}")
    whole = not re.search("…|NAME", line) and line not in PARTIAL
    if len(words) > named and whole:
        check_cli(words)


def test_what_is_no_whole_command_is_still_on_a_page() -> None:
    assert set(PARTIAL) <= set(sentences())


def every() -> Iterator[Any]:
    """Each line once; further lines of one shell script are slow."""
    seen = set()
    own = [line for name in ("README.md", "GUIDE.md") for line in fenced(ROOT / name)]
    listed = sorted({x for page in PAGES for x in shell_lines(page)})
    for line in dict.fromkeys([*listed, *MORE, *own]):
        script = re.findall(r"bash (experiments/\S+\.sh)", line)[-1:]
        again = bool(script) and script[0] in seen
        seen |= set(script)
        yield pytest.param(line, marks=pytest.mark.slow) if again else line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's root, with the recorders in bin/."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("experiments", "zpp_lab", "conf", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "recorder").write_text(RECORDER)
    (folder / "bin" / "recorder").chmod(0o755)
    for name in RECORDED:
        (folder / "bin" / name).symlink_to("recorder")
    left = ["data_cache/installation-bpe-x/tokenizer.json"]  # what the commands would leave
    for size in ("", "_x2"):
        base = f"runs/finetune_30b{size}_base"
        left += [f"{base}/summary.json", f"{base}/checkpoints/step-00000120/x"]
    for name in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    return folder


def recorded(line: str, place: Path) -> list[list[str]]:
    """The commands that a line of bash gives."""
    record = place / "record"  # a file each, as some run side by side
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    kept = {k: v for k, v in os.environ.items() if k not in ("CALL", "CALL_END", "LIMIT")}
    own = {"PATH": f"{place}/bin:{os.environ['PATH']}", "RECORD": str(record)}
    own |= {"REAL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    own |= {"BACKGROUND": f"{place}-background", "POLL": "0.1"}
    own |= {"TORCHINDUCTOR_CACHE_DIR": f"{place}-compiled"}
    said = subprocess.run(
        ["bash", "-c", line], cwd=place, env=kept | own, capture_output=True, text=True, check=False
    )
    assert "command not found" not in said.stderr, said.stderr
    assert "unbound variable" not in said.stderr, said.stderr
    assert "syntax error" not in said.stderr, said.stderr
    return [one.read_text().split("\0")[:-1] for one in sorted(record.iterdir())]


@pytest.mark.parametrize("line", [*every()])
def test_what_a_line_starts_is_there(line: str, place: Path) -> None:
    commands = recorded(line, place)
    assert commands, f"{line}: starts nothing"
    for command in commands:
        check(command)


# ---------------------------------------------------------------------- reading a command


def check(command: list[str]) -> None:
    name, *words = command
    if name == "zpp-lab":
        check_cli(words)
    elif name == "torchrun":
        check_script(*after_options(words))
    elif name.startswith("python") and words and words[0] not in ("-c", "--version"):
        module = words[1] if words[0] == "-m" else None
        if module is None:
            check_script(words[0], words[1:])
        elif module.startswith("zpp_lab.tools.bench."):
            check_bench(module.rpartition(".")[2], words[2:])
        elif module == "zpp_lab.cli":
            check_cli(words[2:])
        elif module == "pytest":
            check_tests(words[2:])
        elif module.startswith("tests."):
            assert read_by(importlib.import_module(module), words[2:])
        else:
            assert importlib.util.find_spec(module.split(".")[0]) or module == "pip", command


def after_options(words: list[str]) -> tuple[str, list[str]]:
    """torchrun's words → the script and its own."""
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert set(words[:at]) <= {"--standalone", "--nproc-per-node", "1", "2", "4"}, words
    return words[at], words[at + 1 :]


def check_cli(words: list[str]) -> None:
    known, rest = _parser()[0].parse_known_args(words)
    assert known.command is not None, words
    rest = check_words(known, rest)
    if known.command == "train":
        check_config(rest)
    elif known.command in ("study", "prepare"):
        check_study(known, rest)
    elif known.command == "plan":
        config = check_config(rest)
        if known.machine is not None:
            _check(config, None)  # whether a machine has figures for it
    elif known.command == "bench":
        check_bench(known.what, rest)
    elif known.command == "build":
        build.words().parse_args(rest)


def check_config(words: Sequence[str]) -> Config:
    mine = ("run.dir=", "run.arm=", "seed=")  # differ by run, and need no second look
    config = composed(tuple(w for w in words if not w.startswith(mine)))  # the last of a name wins
    Recipe(config.recipe, config.cluster.dp)
    return config


def check_study(known: argparse.Namespace, overrides: list[str]) -> None:
    """The study's own settings are tested elsewhere; here one arm under the line's overrides."""
    study = compose.load_study(known.name, {}, overrides)
    arms = getattr(known, "arms", None)
    names = matching(study, arms.split(",")) if arms else [study.baseline]
    if overrides:
        arm = next(arm for arm in study.arms if arm.name == names[0])
        check_config(run_overrides(study, arm, 1, Path("runs", study.name, arm.name, "seed1")))


def check_bench(what: str, words: list[str]) -> None:
    module = importlib.import_module(f"zpp_lab.tools.bench.{what}")
    (asked,) = read_by(module, words)
    if what == "step":
        limits(asked.link_gbps, asked.nodes)
        step_arms.arms([w for w in asked.recipes.split(",") if w] + asked.arm, asked.overrides)


def check_tests(words: list[str]) -> None:
    files = [ROOT / word for word in words if word.startswith("tests/")]
    assert files
    for file in files:
        assert file.exists(), file
        if "-k" in words:
            assert f"_{words[words.index('-k') + 1]}_" in file.read_text()


# ---------------------------------------------------------------------- scripts


def check_script(path: str, words: list[str]) -> None:
    """Its own parser takes the words, and Hydra the settings among them: of real ranks, mostly."""
    script = loaded(path)
    for asked in read_by(script, words) if hasattr(script, "argparse") else []:
        check_config(["engine=fsdp", *getattr(asked, "overrides", [])])


class _Read(Exception):
    """The words have been read; nothing is started."""


def read_by(module: ModuleType, words: list[str]) -> list[argparse.Namespace]:
    """What `module.main` makes of its words, without going on. An unknown one fails."""
    found: list[argparse.Namespace] = []
    with pytest.MonkeyPatch.context() as patch, reading(patch, found):
        patch.setattr(sys, "argv", ["script", *words])
        takes_words = module.main.__code__.co_argcount > 0
        module.main(words) if takes_words else module.main()
    assert found, f"{module.__name__} reads no words"
    return found


@contextmanager
def reading(patch: pytest.MonkeyPatch, found: list[argparse.Namespace]) -> Iterator[None]:
    for name in ("parse_args", "parse_intermixed_args"):
        own = getattr(argparse.ArgumentParser, name)

        def stop(self, args=None, namespace=None, own=own):  # type: ignore[no-untyped-def]
            try:
                found.append(own(self, args, namespace))
            except SystemExit:
                pytest.fail(f"{self.prog} does not take {args if args is not None else sys.argv}")
            raise _Read

        patch.setattr(argparse.ArgumentParser, name, stop)
    try:
        yield
    except _Read:
        return
