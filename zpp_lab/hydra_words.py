"""Values as words of a command line, in the grammar of Hydra's overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[\w./-]*[A-Za-z_/][\w./-]*", re.ASCII)
_FOREIGN = re.compile(r"[^\s,()\[\]{}:='\"\\]*[^\x00-\x7f][^\s,()\[\]{}:='\"\\]*")
_NUMBER = re.compile(r"[-.\d_]+(e[-\d]*)?|-?(nan|inf)|null|true|false", re.IGNORECASE)


def written(value: Any) -> str:
    """A value as Hydra reads it; quotes only where they are needed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if not isinstance(value, str):
        return repr(value)
    bare = _BARE.fullmatch(value) and not _NUMBER.fullmatch(value)
    return value if bare else quote(value)


def quote(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def from_home(override: str) -> str:
    """`name=~/x` with the user's own folder in place of ~, which no shell expands behind a name and
    Hydra cannot read; other overrides as they are."""
    name, mark, value = override.partition("=")
    bare = value.strip("\"'")
    if not mark or not (bare == "~" or bare.startswith("~/")) or "," in bare:
        return override
    return f"{name}={quote(os.path.expanduser(bare))}"


def readable(override: str) -> str:
    """`from_home`, and with quotes around what has letters that Hydra's grammar does not know."""
    name, mark, value = from_home(override).partition("=")
    if value.isascii() or "'" in value or '"' in value:
        return f"{name}{mark}{value}"
    return f"{name}={_FOREIGN.sub(lambda found: quote(found[0]), value)}"


def setting_of(word: str) -> str:
    """The setting, or the group of conf/, that an override names: `recipe` of +recipe=w4."""
    return word.lstrip("+").split("=")[0]
