"""A run's settings as flat dotted names: what differs between two runs, and what each is called.

Configs are `Config` or plain mappings, as folders of older versions hold them too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any

from zpp_lab.config.load import load, outdated, written
from zpp_lab.config.schema import Config, RecipeConfig, RuleConfig
from zpp_lab.config.wires import WIRES, Wire
from zpp_lab.files import conf_dirs, read_yaml

RAW = "raw"  # the tensor's own bytes
DERIVED = "wires"  # in a run's config.yaml besides its settings, from which it follows
_SCOPE = ("name", "ndim", "min_numel", "max_numel")  # of a rule: whose it is
_CODEC = (".bits", ".codec")  # a wire's settings that give it one
_OF_WIRES = ("recipe.weights", "recipe.grads", "recipe.acts")  # and those of one direction or link
_NONE: tuple[Any, ...] = (None, [])  # values that a name leaves out
_NAME = 100  # characters that an arm's name may have, shown next to others
_RULED = ("rules", "phases")  # a recipe's settings that hold rules
RULED = tuple(f"recipe.{name}" for name in _RULED)
# As which older folders hold a rule for every wire: before the fifth one came, and after.
_FOUR, EVERY_WIRE = ([w for w, s in WIRES.items() if s.number < n] for n in (4, 5))
# Settings that may differ between two starts of one run: they change no numbers.
FREE = (
    "run",
    "tracking",
    "engine.threads",
    "engine.graph",
    "engine.place",
    "engine.gpu_gib",
    "engine.host_gib",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.checkpoint_weights_only",
    "train.checkpoint_host_gib",
    "train.checkpoint_staging_mib",
    "train.checkpoint_full_disk",
    "train.optimizer_place",
    "train.profile",
    "engine.timeout_seconds",
    "engine.silence_seconds",
)
# they stand with what is free, but say with which state a run begins
_BEGINS = ("run.start_from", "run.memory")


def flat_config(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of `config` by its dotted name. One that a stored mapping lacks has
    today's default, as runs then behaved; a removed one without effect is left out."""
    if isinstance(config, Config):
        return _completed(flatten(asdict(config)), "recipe.")
    stored = {k: v for k, v in flatten(_settings(config)).items() if not outdated(k, v)}
    return flatten(asdict(Config())) | _completed(stored, "recipe.")


def stored_config(config: Mapping[str, Any]) -> Config:
    """Load a run's config.yaml."""
    if not isinstance(config, Mapping):
        return load(Config, config)
    settings, recipe = _settings(config), config.get("recipe")
    own = {"recipe": _completed(recipe)} if isinstance(recipe, Mapping) else {}
    return load(Config, settings | own)


def stored_recipe(recipe: Mapping[str, Any]) -> RecipeConfig:
    """Load the recipe of a run's config.yaml."""
    return load(RecipeConfig, _completed(recipe))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != DERIVED}


def _completed(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe's settings, flat or nested; a rule for all former wires is for all."""
    fifth = f"{prefix}sharding.weights" in flatten(dict(recipe))
    every = [EVERY_WIRE] if fifth else [EVERY_WIRE, _FOUR]
    names = [name for key in _RULED if recipe.get(name := prefix + key)]
    return dict(recipe) | {name: with_wires(recipe[name], every, None) for name in names}


def with_wires(value: Any, every: Sequence[Any], now: Any) -> Any:
    """Return rules, or phases with rules, with `now` for wires that are one of `every`."""
    if isinstance(value, Mapping):
        own = {k: with_wires(v, every, now) for k, v in value.items()}
        return own | ({"wires": now} if "wires" in value and value["wires"] in every else {})
    return [with_wires(one, every, now) for one in value] if isinstance(value, list) else value


def every_setting(config: Config) -> dict[str, Any]:
    """Return a run's settings, and under `wires` what each wire carries in the end, short-hands,
    rules and defaults resolved, by phase. A record; nothing reads it."""
    phases = [(phase.first, phase.config.recipe) for phase in config.phases]
    wires = {
        (f"after {first}" if first else ""): {w: _on_wire(recipe, w) for w in recipe.wires}
        for first, recipe in phases
    }
    return {**asdict(config), "cluster": config.cluster.stored, DERIVED: wires.pop("") | wires}


def changed_settings(now: Any, usual: Any = None) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from `usual` (None: their defaults), as a
    nested mapping from which `load` builds the same."""
    found = {}
    for field in fields(now):
        value, default = getattr(now, field.name), getattr(usual, field.name, field.default)
        if usual is None and field.default_factory is not MISSING:
            default = field.default_factory()
        if value != default:
            found[field.name] = _changed(value, default)
    return found


def _changed(value: Any, default: Any) -> Any:
    if isinstance(value, list):
        return [changed_settings(one) if is_dataclass(one) else one for one in value]
    return changed_settings(value, default) if is_dataclass(value) else value


def carried(config: Config) -> str:
    """Describe in a line what the wires carry: equal ones together, raw ones left out."""
    groups: dict[str, list[str]] = {}
    sizes = {"acting": config.cluster.tp, "piping": config.cluster.pp}
    for wire in (w for w in config.recipe.wires if sizes.get(WIRES[w].needs) != 1):
        for i, sent in enumerate(_sent(config.recipe, wire)):
            text = " ".join(f"{name}={written(value)}" for name, value in flatten(sent).items())
            if i or sent["codec"] != "none":
                groups.setdefault(text, []).append(wire)
    return "; ".join(f"{', '.join(wires)} {text}" for text, wires in groups.items())


def _on_wire(recipe: RecipeConfig, wire: Wire) -> dict[str, Any]:
    own, *ruled = _sent(recipe, wire)
    return own | ({"rules": ruled} if ruled else {})


def _sent(recipe: RecipeConfig, wire: Wire) -> list[dict[str, Any]]:
    """Return what a wire carries for all parameters, then for those of each rule, which it names;
    the last match holds. A rule that changes nothing is left out."""
    own, usual = recipe.wire(wire), RuleConfig()
    sent = [own.resolved()]
    for rule in (rule for rule in recipe.rules if rule.holds_on(wire)):
        every = {key: getattr(rule, key) for key in _SCOPE}
        scope = {key: value for key, value in every.items() if value != getattr(usual, key)}
        brought = {"codec": "none"} if rule.exempt else rule.set.over(own).resolved()
        if not scope:
            sent = [brought]
        elif len(sent) > 1 or brought != sent[0]:
            sent.append(scope | brought)
    return sent


def quantizes(flat: Mapping[str, Any]) -> bool:
    """Return whether a run's settings (`flat_config`) put a codec on any wire."""
    of_wires = (v for k, v in flat.items() if k.startswith("recipe.") and k.endswith(_CODEC))
    return bool(flat.get("recipe.rules") or flat.get("recipe.phases")) or any(
        value is not None for value in of_wires
    )


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the dotted names that differ, apart from those that change no numbers."""
    keys = sorted(set(before) | set(now))
    return [k for k in keys if before.get(k) != now.get(k) and not is_free(k)]


def is_free(key: str) -> bool:
    """Return whether the setting changes no numbers."""
    return key not in _BEGINS and any(key == name or key.startswith(name + ".") for name in FREE)


def flatten(values: Any, prefix: str = "", join: str = ".") -> dict[str, Any]:
    """Flatten {"a": {"b": 1}} into {"a.b": 1}; lists are values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}{join}{key}" if prefix else str(key), join)
    return out


def run_name(config: Mapping[str, Any]) -> str:
    """Return the user's name for a run, or its arm and seed."""
    return (config.get("run") or {}).get("name") or f"{arm_of(config)} seed{config.get('seed')}"


def arm_of(config: Mapping[str, Any]) -> str:
    """Return the arm that a study or a sweep named, or what its recipe is called."""
    return (config.get("run") or {}).get("arm") or arm_name(config)


def arm_name(
    config: Config | Mapping[str, Any], varying: Collection[str] = (), name: str | None = None
) -> str:
    """Name a run among runs that differ from it in `varying`, by default for its recipe. A recipe
    that differs from its file says where, such as "zero3 weights.bits=4": the name alone would say
    that there is no codec."""
    settings = heeded(config)
    usual = {} if name else as_written(str(settings["recipe.name"]))
    keys = {*varying, *(key for key in usual if settings.get(key) != usual[key])} - {"seed"}
    parts = [name or str(settings["recipe.name"])]
    for key in sorted(keys):
        value = settings.get(key, usual.get(key))
        if value not in _NONE or usual.get(key) not in _NONE:
            parts.append(f"{key.removeprefix('recipe.')}={_shown(key, value)}")
    return within(_NAME, " ".join(parts))


def _shown(key: str, value: Any) -> str:
    """Show a setting's value without spaces."""
    if key == "recipe.rules":
        value = [_rule(rule) for rule in value or ()]
    if key == "recipe.phases":
        value = [_phase(phase) for phase in value or ()]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _rule(rule: Mapping[str, Any]) -> str:
    """Show a rule's parameters, and their bits or codec; a hash stands for its other settings."""
    every = flatten(asdict(RuleConfig()))
    given = {k: v for k, v in flatten(dict(rule)).items() if v != every.get(k)}
    name = given.pop("name", every["name"])
    key = next((k for k in ("exempt", "set.bits", "set.codec") if k in given), None)
    what = given.pop(key) if key else RAW
    more = f"~{_hash(sorted(given.items()))}" if given else ""
    return f"{name}:{RAW if key == 'exempt' else what}{more}"


def _phase(phase: Mapping[str, Any]) -> str:
    """Show when a phase begins, and what it sets."""
    parts = []
    for key, value in phase.items():
        if isinstance(value, Mapping):
            given = {k: v for k, v in flatten(dict(value)).items() if v is not None}
            parts += [f"{key}.{k}={v}" for k, v in given.items()] or [f"{key}={RAW}"]
        elif key != "after" and value is not None:
            parts.append(f"{key}={_shown(f'recipe.{key}', value)}")
    return f"{phase['after']}:{'+'.join(parts)}"


def _hash(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8]


def within(most: int, text: str) -> str:
    """Shorten `text` to `most` characters, with a hash for the rest."""
    if len(text) <= most:
        return text
    end = f" more={_hash(text)}"
    kept = text[: most - len(end)]
    head, _, last = kept.rpartition(" ")
    return (kept if "=" in last or not head else head) + end


def heeded(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with unused codec settings at their defaults, such as a block without
    bits: a sweep over bits that include null and over blocks then has one baseline."""
    flat = flat_config(config)
    if quantizes(flat):
        return flat
    plain = _plain()
    return flat | {k: plain.get(k) for k in {*flat, *plain} if k.startswith(_OF_WIRES)}


@cache
def _plain() -> dict[str, Any]:
    """Return the settings of a recipe that sets nothing."""
    return {k: v for k, v in flatten(asdict(Config())).items() if k.startswith("recipe.")}


@cache
def as_written(recipe: str) -> dict[str, Any]:
    """Return the settings of conf/recipe/NAME.yaml; {} for a recipe that has no file."""
    files = [folder / "recipe" / f"{recipe}.yaml" for folder in conf_dirs()]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return {}
    values = read_yaml(file)
    values.pop("defaults", None)  # what a recipe does not say is RecipeConfig's default
    flat = heeded({"recipe": asdict(load(RecipeConfig, values))})
    return {k: v for k, v in flat.items() if k.startswith("recipe.")}
