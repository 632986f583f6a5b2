"""zpp-lab, the console script: from words to a command, from errors to exit codes."""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from zpp_lab.commands.adding import FORMAT, Add, check_words
from zpp_lab.commands.machine import add_machine
from zpp_lab.commands.results import add_results, report_advice
from zpp_lab.commands.training import add_training
from zpp_lab.commands.weights import add_weights
from zpp_lab.folders import missing

ABOUT = """Train with quantized collectives, judge what that costs, plan and measure runs.

    zpp-lab doctor                                       what this machine can do
    zpp-lab train recipe=zeropp train.steps=100          one run
    zpp-lab train -m recipe.weights.bits=2,4,8 seed=1,2  a sweep
    zpp-lab study smoke                                  arms, seeds, verdicts and a report
    zpp-lab plan model=13b cluster=1x4                   what a run will send and hold"""
EXIT_CODES = """exit codes: 0 done; 1 a run failed; 2 a mistake in the command or in what it reads;
75 stopped by --for (0 of ranks that torchrun or srun started, which would take 75 for a failure);
130 stopped by Ctrl-C (the same command goes on)"""


_REMOVED = {"compare": "compare was removed; use zpp-lab export DIR… --out runs.csv"}
_CHECK = "; check the path, and that its folder can be written"
_ROOM = "make room, then the same command goes on"
_WRITABLE = "name a place that you may read and write, or change its permissions"
_FIXES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: f"a file may not grow so large here (ulimit -f): raise the limit or {_ROOM}",
    errno.ENOTDIR: "a part of this path is a file: name another one",
    errno.EEXIST: "a file of that name is there: name another one, or delete it",
    errno.EISDIR: "this is a folder: name a file",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOENT: "check the path, and that its folder is there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; a user's mistake is 2 with one clear message."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, add = _parser()
    if words and not words[0].startswith("-") and words[0] not in add.names:
        return _mistake("", _no_command(words[0], add.names))
    known, rest = parser.parse_known_args(words)
    if known.command is None:
        if rest:
            return _mistake("", f"unknown option {rest[0]}; see zpp-lab --help")
        parser.print_help(sys.stderr)
        return 2
    return _call(known, rest)


def _parser() -> tuple[argparse.ArgumentParser, Add]:
    parser = argparse.ArgumentParser(
        "zpp-lab",
        usage="zpp-lab [-h] COMMAND ...",
        description=ABOUT,
        epilog=EXIT_CODES,
        formatter_class=FORMAT,
        allow_abbrev=False,
    )
    add = Add(parser)
    for more in (add_training, add_results, add_weights, add_machine):
        more(add)
    return parser, add


def _call(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        return int(args.call(args, check_words(args, rest)) or 0)
    except OSError as error:
        return _mistake(args.command, _told(error))
    except ValueError as error:
        return _mistake(args.command, _explained(error))
    except ModuleNotFoundError as error:
        return _mistake(args.command, report_advice(error, "this again"))
    except KeyboardInterrupt:
        alone = args.command in ("train", "study") and not args.dry_run
        goes_on = alone and not getattr(args, "multirun", False)  # a sweep has said how
        more = "; the same command goes on from here" if goes_on else ""
        print(f"\ninterrupted{more}", file=sys.stderr)
        return 130


def _mistake(command: str, text: str) -> int:
    print(f"zpp-lab {command}".rstrip() + f": {text}", file=sys.stderr)
    return 2


def _no_command(word: str, names: list[str]) -> str:
    if word in _REMOVED:
        return _REMOVED[word]
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no command {word!r}{hint}; there are: {', '.join(names)}"


def _explained(error: ValueError) -> str:
    """The text of an error; of a setting's own check without pydantic's frame."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(str(one.get("ctx", {}).get("error", one["msg"])) for one in error.errors())


def _told(error: OSError) -> str:
    """The file and what is wrong with it, without Python's error number."""
    if error.strerror is None:
        return str(error)
    text = error.strerror[:1].lower() + error.strerror[1:]
    if error.filename is not None:
        text = f"{error.filename}: {text}"
    if isinstance(error.filename, str) and error.errno == errno.ENOENT:
        return f"{error.filename}: {missing(Path(error.filename), 'file or folder')}{_CHECK}"
    fix = _FIXES.get(error.errno or 0, "")
    told = error.filename is None and "; " in text  # whoever raised it has named one
    return text if told or not fix else f"{text}; {fix}"


if __name__ == "__main__":
    sys.exit(main())
