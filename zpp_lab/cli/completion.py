"""Tab completion, as of every program of Hydra's: eval "$(zpp-lab -sc install=bash)".

Hydra's scripts for bash, zsh and fish ask `zpp-lab -sc query=SHELL` what may follow the words so
far. Commands, options and studies are answered here, settings and files of conf/ by Hydra itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
from collections.abc import Sequence

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
