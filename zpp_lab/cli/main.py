"""zpp-lab, the console script: from words to a command, from errors to exit codes."""

from __future__ import annotations

import argparse
import codecs
import difflib
import io
import os
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
EXIT_CODES = """exit codes: 0 done; 1 a run failed; 2 a mistake in the command or in what it reads;
75 stopped by --for (0 of ranks that torchrun or srun started, which would take 75 for a failure);
130 stopped by Ctrl-C (the same command goes on)"""
_ASCII = {"×": "x", "±": "+/-", "≥": ">=", "≤": "<=", "≠": "!=", "→": "->", "…": "...", "’": "'"}
_ASCII |= dict.fromkeys("–—─·", "-")  # for terminals and files that lack these signs
_REFUSING = ("strict", "surrogateescape", "backslashreplace")  # Python's own; the last: stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script; return its exit code, 2 with one message for a mistake."""
    _print_every_sign()
    words = list(sys.argv[1:] if argv is None else argv)
    parser, add = _parser()
    if words and not words[0].startswith("-") and words[0] not in add.names:
        near = difflib.get_close_matches(words[0], add.names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        valid = ", ".join(add.names)
        return _mistake("", f"{words[0]!r}: unknown command{hint}; valid names: {valid}")
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
        # Python's end would try to write what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def _print_every_sign() -> None:
    """Let stdout and stderr, and those of processes started from here, replace signs that their
    encoding lacks: Python would raise an error, after the work is done."""
    codecs.register_error("zpp_lab", _without_signs)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _REFUSING:
            stream.reconfigure(errors="zpp_lab")
            if codecs.lookup(stream.encoding).name != "utf-8":
                os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:backslashreplace"


def _without_signs(error: UnicodeError) -> tuple[str, int]:
    """Python's handler of what cannot be encoded: the nearest ASCII, else an escape."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    plain = (_ASCII.get(s) or s.encode("ascii", "backslashreplace").decode() for s in signs)
    return "".join(plain), error.end


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


if __name__ == "__main__":
    sys.exit(main())
