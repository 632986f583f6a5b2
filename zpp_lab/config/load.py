"""Nested mappings as validated dataclasses, with messages that name the place and the choices.

`written` and `quote` write values in the grammar of Hydra's overrides.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

T = typing.TypeVar("T")


@dataclass(frozen=True)
class Removed:
    """A setting of former versions. kept: values without effect, still valid; None: all."""

    when: str
    instead: str
    kept: tuple[Any, ...] | None = ()


_COPIED = "leave it out: peers' rows are always copied, which was not slower for any model"
REMOVED = {  # by dotted name, of runs and of machines' files
    "engine.pull": Removed("November 2026", _COPIED, ("auto", "copy")),
    "engine.pull_multiprocessors": Removed("November 2026", _COPIED, (0,)),
    "intra.pull": Removed("November 2026", _COPIED, None),
}


ELSEWHERE = {  # names of settings in other training programs → ours
    "checkpoint": ("train.checkpoint_every", "run.start_from"),
    "dataset": ("data.name", "data.path"),
    "devices": ("cluster.gpus_per_node",),
    "epochs": ("train.steps",),
    "eval_steps": ("train.eval_every",),
    "gpus": ("cluster.gpus_per_node",),
    "gradient_accumulation_steps": ("train.micro_steps",),
    "learning_rate": ("train.lr",),
    "logger": ("tracking.wandb", "tracking.tensorboard"),
    "max_epochs": ("train.steps",),
    "max_grad_norm": ("train.clip",),
    "max_length": ("data.seq_len",),
    "max_steps": ("train.steps",),
    "num_nodes": ("cluster.nodes",),
    "optimizer": ("train.lr", "train.weight_decay", "train.optimizer_state"),
    "output_dir": ("run.dir",),
    "precision": ("train.param_dtype", "train.reduce_dtype"),
    "save_steps": ("train.checkpoint_every",),
    "scheduler": ("train.schedule",),
}


def outdated(name: str, value: Any) -> bool:
    """Return whether the setting of this dotted name is gone, and `value` had no effect."""
    gone = REMOVED.get(name)
    return gone is not None and (gone.kept is None or value in gone.kept)


def _without_outdated(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    return {
        key: _without_outdated(value, f"{place}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if not outdated(f"{place}{key}", value)
    }


def load(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build `cls` from a nested mapping; a ValueError lists every fault and the valid names."""
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping of names to values, not {str(values)[:40]!r}")
    flags = [f"{place}={_quoted(flag)}: use a number" for place, flag in _misplaced(cls, values)]
    try:
        made = _adapter(cls).validate_python(_without_outdated(dict(values)))
    except ValidationError as error:
        faults = [_explain(cls, e) for e in error.errors() if e["type"] != "missing"]
        if absent := _absent(cls, error):
            faults.append(f"{', '.join(absent)}: missing")
        raise ValueError("\n".join([*flags, *faults])) from None
    if flags:
        raise ValueError("\n".join(flags))
    return made


def _absent(cls: type, error: ValidationError) -> list[str]:
    """Return what is missing, apart from what an unknown name next to it was meant to be."""
    faults = error.errors()
    unknown = [e["loc"] for e in faults if e["type"] == "unexpected_keyword_argument"]
    absent = []
    for place in (e["loc"] for e in faults if e["type"] == "missing"):
        siblings = [str(u[-1]) for u in unknown if u[:-1] == place[:-1]]
        if not difflib.get_close_matches(str(place[-1]), siblings, n=1):
            absent.append(".".join(map(str, place)))
    return absent


def _misplaced(cls: type, values: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, bool]]:
    """Yield every true or false where a number belongs, which Python takes for 1 or 0."""
    if isinstance(values, Mapping):
        inner = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list):
        inner = [(str(i), value) for i, value in enumerate(values)]
    else:
        inner = []
        if isinstance(values, bool):
            hint = _hint(cls, list(place))
            taken = get_args(hint) or (hint,)
            if bool not in taken and {int, float} & set(taken):
                yield ".".join(place), values
    for key, value in inner:
        yield from _misplaced(cls, value, (*place, key))


def _quoted(value: Any) -> str:
    """Return a value as a file has it, text in quotes."""
    return written(value) if value is None or isinstance(value, bool) else repr(value)


def _explain(cls: type, error: Any) -> str:
    # pydantic names which type of several it tried, such as literal['host'], as a part
    place = ".".join(part for part in map(str, error["loc"]) if "[" not in part)
    if error["type"] == "unexpected_keyword_argument":
        return unknown_key(cls, place)
    if error["type"] == "value_error":  # raised by a __post_init__ above: says it all
        return str(error["ctx"]["error"])
    given = _quoted(error["input"])
    if error["type"] == "dataclass_type":  # a group of settings
        names = ", ".join(f"{place}.{name}" for name in valid_names(cls, place.split(".")))
        return f"{place}={given}: expected nested settings; set {names}"
    null = ", or null" if type(None) in get_args(_hint(cls, place.split("."))) else ""
    if error["type"] == "list_type" and (inner := valid_names(cls, place.split("."))):
        return f"{place}={given}: use a list of nested settings, such as [{{{inner[0]}: …}}]{null}"
    return f"{place}={given}: use {_expected(error)}{null}"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list, such as [a,b]",
    "dict": "a mapping, such as {a: 1}",
}


_LIMITS = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "less than {lt:g}",
}


def _expected(error: Any) -> str:
    """Say what a setting takes, from pydantic's error."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    if error["type"] in _LIMITS:
        return _LIMITS[error["type"]].format(**error["ctx"])
    return _KINDS.get(error["type"].split("_")[0], str(error["msg"]))


def unknown_key(cls: type, place: str, groups: Iterable[str] = ()) -> str:
    """Build the message for an unknown dotted key. groups: names valid at the top level too."""
    if gone := REMOVED.get(place):
        return f"{place} was removed in {gone.when}; {gone.instead}"
    *parents, key = place.split(".")
    while parents and not valid_names(cls, parents):  # the group itself is unknown
        *parents, key = parents
    valid = sorted({*valid_names(cls, parents), *(() if parents else groups)})
    meant = _meant(cls, place, key, valid)
    hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
    where = f"in {'.'.join(parents)}" if parents else "at the top level"
    return f"{place}: unknown setting.{hint} Valid names {where}: {', '.join(valid)}"


def _meant(cls: type, place: str, key: str, valid: Sequence[str]) -> list[str]:
    """Guess what the unknown `place` stands for, the likeliest first: the name that other programs
    use, a setting of another group with the same last name or a part of it (lora_rank, dtype,
    grad_clip), or a similar name. key: the first unknown part of `place`; `valid`: the names
    there."""
    last, settings = place.rpartition(".")[2], _settings(cls)
    usual = {name: names for name, names in ELSEWHERE.items() if set(names) <= set(settings)}
    for name in dict.fromkeys((last, key)):
        if name in usual:
            return list(usual[name])
        if name == last:
            leaves = {name: name.rpartition(".")[2] for name in settings}
            there = [name for name, leaf in leaves.items() if leaf == last]
            there = there or [n for n in settings if n.replace(".", "_").endswith(f"_{last}")]
            ranked = sorted(there, key=lambda name: -_likeness(place, name))
            if ranked:
                return ranked[: 1 if _likeness(place, ranked[0]) > 0.9 else 3]
    near = {name: _likeness(key, name) for name in valid}
    if last == key:  # a whole setting, which may be of another group
        near = {name: _likeness(key, leaf) - 0.05 for name, leaf in leaves.items()} | near
        near |= {name: _likeness(key, name) for name in usual}
    best = max(near, key=lambda name: near[name], default="")
    if near.get(best, 0.0) >= 0.6:
        return list(usual.get(best, [best]))
    return [name for name, leaf in leaves.items() if last.endswith(f"_{leaf}")][:3]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _settings(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings below `cls`, without those in lists."""
    found: list[str] = []
    for name, hint in _hints(cls).items():
        inner = next((a for a in (hint, *get_args(hint)) if is_dataclass(a)), None)
        if inner is None or typing.get_origin(hint) is list:
            found.append(prefix + name)
        else:
            found += _settings(typing.cast(type, inner), f"{prefix}{name}.")
    return found


def valid_names(cls: Any, path: list[str]) -> list[str]:
    """Return the field names below `cls` along `path` (list indices are skipped)."""
    cls = _dataclass_in(_hint(cls, path))
    return [f.name for f in fields(cls)] if is_dataclass(cls) else []


def _hint(cls: Any, path: list[str]) -> Any:
    """Return the type below `cls` along `path`; None where there is none."""
    for part in path:
        if not part.isdigit():
            inner = _dataclass_in(cls)
            cls = _hints(inner).get(part) if is_dataclass(inner) else _values_of(cls)
    return cls


def _values_of(hint: Any) -> Any:
    """Return the type of a mapping's values; None where `hint` has no mapping."""
    kinds = (hint, *get_args(hint))
    return next((get_args(a)[1] for a in kinds if typing.get_origin(a) is dict), None)


# of a class; a study asks for each of its runs
_hints: Any = cache(typing.get_type_hints)
_adapter: Any = cache(TypeAdapter)


def _dataclass_in(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is not None:
        return next((a for a in get_args(hint) if is_dataclass(a)), None)
    return hint


_BARE = re.compile(r"[\w./-]*[A-Za-z_/][\w./-]*", re.ASCII)
_FOREIGN = re.compile(r"[^\s,()\[\]{}:='\"\\]*[^\x00-\x7f][^\s,()\[\]{}:='\"\\]*")
_NUMBER = re.compile(r"[-.\d_]+(e[-\d]*)?|-?(nan|inf)|null|true|false", re.IGNORECASE)


def written(value: Any) -> str:
    """Write a value as Hydra reads it; quotes only where they are needed."""
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
    return value if _BARE.fullmatch(value) and not _NUMBER.fullmatch(value) else quote(value)


def quote(value: str) -> str:
    """Write `value` as a quoted string of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def from_home(override: str) -> str:
    """Expand ~ in `name=~/x`, which no shell expands there and Hydra cannot read."""
    name, mark, value = override.partition("=")
    bare = value.strip("\"'")
    if not mark or not (bare == "~" or bare.startswith("~/")) or "," in bare:
        return override
    return f"{name}={quote(os.path.expanduser(bare))}"


def readable(override: str) -> str:
    """Apply `from_home`, and quote letters that Hydra's grammar does not know."""
    name, mark, value = from_home(override).partition("=")
    if value.isascii() or "'" in value or '"' in value:
        return f"{name}{mark}{value}"
    return f"{name}={_FOREIGN.sub(lambda found: quote(found[0]), value)}"


def setting_of(override: str) -> str:
    """Return the setting, or the group of conf/, that an override names: `recipe` of +recipe=w4."""
    return override.lstrip("+~").split("=")[0]
