"""Values as words of a command line, in the grammar of Hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[\w./-]*[A-Za-z_/][\w./-]*")
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
