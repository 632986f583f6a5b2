"""zpp-lab, the console script: from words to a command, from errors to exit codes.

Tab completion is as of every program of Hydra's: eval "$(zpp-lab -sc install=bash)". Its scripts
for bash, zsh and fish ask `zpp-lab -sc query=SHELL` what may follow the words so far. Commands,
options and studies are answered here, settings and files of conf/ by Hydra itself.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zpp_lab.cli.adding import Add, check_words
from zpp_lab.cli.machine import add_machine
from zpp_lab.cli.results import add_results, report_advice
from zpp_lab.cli.training import add_training
from zpp_lab.cli.weights import add_weights
from zpp_lab.config.parser import Parser
from zpp_lab.files import OWN_CONF
from zpp_lab.train.launch.cause import FULL_MEMORY, memory_is_full, mistake

ABOUT = """Train with quantized collectives, judge what that costs, plan and measure runs.

    zpp-lab doctor                                       what this machine can do
    zpp-lab train recipe=zeropp train.steps=100          one run
    zpp-lab train -m recipe.weights.bits=2,4,8 seed=1,2  a sweep
    zpp-lab study first                                  arms, seeds, verdicts and a report
    zpp-lab plan model=13b cluster=1x4                   what a run will send and hold"""
EXIT_CODES = """tab completion: eval "$(zpp-lab -sc install=bash)", or zsh or fish

exit codes: 0 done; 1 a run failed; 2 a mistake in the command or in what it reads;
75 stopped by --for (0 of ranks that torchrun or srun started, which would take 75 for a failure);
130 stopped by Ctrl-C (the same command goes on)"""


_REMOVED = {"compare": "compare was removed; use zpp-lab export DIR… --out runs.csv"}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; a user's mistake is 2 with one clear message."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, add = _parser()
    if words[:1] in (["-sc"], ["--shell-completion"]):
        try:
            return completion(words[1:], parser)
        except ValueError as error:
            return _mistake("", str(error))
    if words and not words[0].startswith("-") and words[0] not in add.names:
        return _mistake("", _no_command(words[0], add.names))
    try:
        known, rest = parser.parse_known_args(words)
    except ValueError as error:
        return _mistake(words[0], str(error))
    if known.command is None and known.version:
        from zpp_lab.runs.provenance import version_text

        print(version_text())
        return 0
    if known.command is None:
        if rest:
            return _mistake("", f"unknown option {rest[0]}; see zpp-lab --help")
        parser.print_help(sys.stderr)
        return 2
    return _call(known, rest)


def _parser() -> tuple[argparse.ArgumentParser, Add]:
    parser = Parser(
        "zpp-lab",
        usage="zpp-lab [-h] COMMAND ...",
        description=ABOUT,
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="store_true", help="print version and commit, then exit"
    )
    add = Add(parser)
    for more in (add_training, add_results, add_weights, add_machine):
        more(add)
    return parser, add


def _call(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        with _own_files(getattr(args, "config_dir", None)):
            return int(args.call(args, check_words(args, rest)) or 0)
    except ModuleNotFoundError as error:
        return _mistake(args.command, report_advice(error, "this again"))
    except BrokenPipeError:  # who read the output has enough of it
        _close_output()
        return 0
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        if memory_is_full(error):
            _mistake(args.command, FULL_MEMORY)
            return 1
        text = mistake(error)
        if text is None:
            raise
        return _mistake(args.command, text)
    except KeyboardInterrupt:
        alone = args.command in ("train", "study") and not args.dry_run
        goes_on = alone and not getattr(args, "multirun", False)  # a sweep has said how
        more = "; the same command resumes after the last checkpoint, if any"
        more = more if goes_on else ""
        print(f"\ninterrupted{more}", file=sys.stderr)
        return 130


@contextmanager
def _own_files(folder: str | None) -> Iterator[None]:
    """--config-dir, told to the processes that the command starts too."""
    before = os.environ.get(OWN_CONF)
    if folder is not None:
        os.environ[OWN_CONF] = os.path.abspath(os.path.expanduser(folder))
    try:
        yield
    finally:
        if before is not None:
            os.environ[OWN_CONF] = before
        elif folder is not None:
            del os.environ[OWN_CONF]


def _mistake(command: str, text: str) -> int:
    print(f"zpp-lab {command}".rstrip() + f": {text}", file=sys.stderr)
    return 2


def _close_output() -> None:
    """Python's end would try to write what is left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_command(word: str, names: list[str]) -> str:
    if word in _REMOVED:
        return _REMOVED[word]
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{word!r}: unknown command{hint}; valid names: {', '.join(names)}"


SHELLS = ("bash", "zsh", "fish")
_NO_SETTING = ("study", "law", "machine")  # folders of conf/ that no setting chooses from


def completion(words: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """What Hydra's -sc or --shell-completion do: install=SHELL, uninstall=SHELL, query=SHELL."""
    what, _, shell = (words[0] if len(words) == 1 else "").partition("=")
    if what not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ValueError(
            "-sc takes install=SHELL or uninstall=SHELL, of bash, zsh and fish: "
            'eval "$(zpp-lab -sc install=bash)"'
        )
    if what != "query":
        print(_by_hydra(f"{what}={shell}"))
        return 0
    line = os.environ.get("COMP_LINE", "").split(None, 1)
    found = _candidates(line[1] if len(line) > 1 else "", parser)
    print(("\n" if shell == "fish" else " ").join(found))
    return 0


def _candidates(line: str, parser: argparse.ArgumentParser) -> list[str]:
    """What may stand in the place of the last word of `line`, which follows the program's name."""
    *before, last = re.split(r"\s+", line.lstrip())
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    if not before:
        return [name for name in commands if name.startswith(last)]
    command = commands.get(before[0])
    if command is None:
        return []
    if last.startswith("-"):
        flags = [flag for action in command._actions for flag in action.option_strings]
        return [flag for flag in flags if flag.startswith(last)]
    names = any(action.dest == "name" for action in command._actions)
    if names and all(word.startswith("-") for word in before[1:]):
        from zpp_lab.config.compose import study_names

        return [name for name in study_names() if name.startswith(last)]
    if not any(action.dest == "settings" for action in command._actions):
        return []
    settings = [word for word in before[1:] if "=" in word and not word.startswith("-")]
    os.environ["COMP_LINE"] = " ".join(["zpp-lab", *settings, last])
    groups = tuple(f"{name}{sign}" for name in _NO_SETTING for sign in "=/")
    found = _by_hydra("query=bash").split()
    return [word for word in found if word not in _NO_SETTING and not word.startswith(groups)]


def _by_hydra(words: str) -> str:
    """What Hydra's own command prints of a completion."""
    from zpp_lab.study.run.multirun import by_hydra

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        by_hydra(lambda _: None, "-sc", words, program="zpp-lab")
    return said.getvalue()


if __name__ == "__main__":
    sys.exit(main())
