"""How a command is added to the parser, and which words it takes besides its options."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable

from zpp_lab.files import conf_names, listed_names

Call = Callable[[argparse.Namespace, list[str]], int]  # options, the other words → exit code
SETTINGS = """Settings are written name=value, such as recipe=zeropp train.steps=100
recipe.weights.bits=4. model, data, recipe, cluster, engine and lora name a file of conf/,
experiment one with the settings of a whole run, and hardware what it runs on. As in Hydra
+name=value adds to a mapping and ~name takes out what files say of a setting, for its default.
`zpp-lab train --dry-run --full` prints all of them with their values."""
CONFIG_DIR = "your own files in addition to conf/, such as DIR/recipe/mine.yaml for recipe=mine"


def names_of(group: str, plural: str) -> str:
    """Return the names of a group of conf/ for a command's help, those to begin with first."""
    text = f"{plural}: {listed_names(group, conf_names(group))}"
    return textwrap.fill(text, 90, break_on_hyphens=False)


class Add:
    """Adds commands to `parser`: `add(name, text, call)` returns the command's own parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(
            dest="command", metavar="COMMAND ...", title="commands", prog=parser.prog
        )

    @property
    def names(self) -> list[str]:
        return list(self._commands.choices)

    def __call__(
        self, name: str, text: str, call: Call, more: str = "", passes_on: bool = False
    ) -> argparse.ArgumentParser:
        """text: one line for the list of commands; `more` follows it in the command's own help.
        passes_on: words and options that are not known here, --help too, go to the call."""
        made = self._commands.add_parser(
            name,
            help=text,
            description=f"{text}\n\n{more}".rstrip(),
            add_help=not passes_on,
            allow_abbrev=False,
        )
        made.set_defaults(call=call, passes_on=passes_on, settings=None)
        return made


def takes_settings(command: argparse.ArgumentParser) -> None:
    """Let `command` take Hydra's overrides as well, behind its other words."""
    command.add_argument(
        "settings", nargs="*", default=[], metavar="setting=value", help="see below"
    )
    command.add_argument("--config-dir", "-cd", metavar="DIR", help=CONFIG_DIR)
    command.epilog = SETTINGS


def check_words(args: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the words that the call gets: settings or none. ValueError for others."""
    if args.passes_on:
        return rest
    for word in rest:
        if word.startswith("-"):
            option = word.split("=")[0]
            raise ValueError(f"unknown option {option}; see zpp-lab {args.command} --help")
    words = [*(args.settings or []), *rest]
    for word in words:
        if args.settings is None:
            raise ValueError(f"{word!r} is not expected here; see zpp-lab {args.command} --help")
        taken_out = word.startswith("~") and word != "~"
        if "=" not in word.lstrip("+")[1:] and not taken_out:  # a name, then the sign
            raise ValueError(f"{word!r}: write settings as name=value, such as train.steps=100")
    return words
