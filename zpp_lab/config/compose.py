"""Configs through Hydra: conf/*.yaml plus overrides become one validated `Config`.

Hydra's ConfigStore has the defaults of the dataclasses, as plain values: `load` checks types and
names. Files of conf/ hold what differs. `run_dir` and `check_same_run` choose and check a run's
folder.
"""

from __future__ import annotations

import difflib
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zpp_lab.config.factors import expand_arms
from zpp_lab.config.flat import differing, flat_config
from zpp_lab.config.load import load, quote, readable, setting_of, unknown_key, valid_names, written
from zpp_lab.config.schema import Config
from zpp_lab.config.study import StudyConfig
from zpp_lab.files import (
    OWN_CONF,
    check_name,
    conf_dir,
    conf_dirs,
    conf_names,
    listed_names,
    missing,
    parse_yaml,
    read_yaml,
)

ConfigStore.instance().store("base_config", asdict(Config()), provider="zpp_lab")

GROUPS = (  # of conf/, whose settings lie elsewhere in `Config`
    *("experiment", "hardware", "hparams_search", "lora"),
)
EXPERIMENTS = {  # models that nobody trains with the settings of a tiny run → a whole one
    "1_3b": "pretrain_1b",
    "6_7b": "pretrain_7b",
    "13b": "pretrain_13b",
    "32_5b": "finetune_30b",
}
PLUGINS = {  # of Hydra, which extras of zpp_lab install → the extra
    **{f"hydra/launcher/{name}": "slurm" for name in ("submitit_slurm", "submitit_local")},
    "hydra/launcher/joblib": "joblib",
    "hydra/sweeper/optuna": "optuna",
}
EXAMPLES = {"recipe/tagc": "examples/tagc"}  # plugins of a checkout, with files of their own
_LENGTH = ("train.steps", "train.warmup_steps", "train.eval_every")
_SHAPE = ("dim", "layers", "heads", "kv_heads", "ffn")
_DETAILS = ("tied_head", "rope_theta", "norm_eps", "qk_norm")
OWNERS = {  # settings that only this engine or model heeds; of others `Config` itself says so
    "virtual": ("engine", ("lanes",)),
    "fsdp": (
        "engine",
        ("ordered", "prefetch", "offload", "place", "gpu_gib", "host_gib", "transport"),
    ),
    "deepspeed": ("engine", ("emulate_nodes",)),
    "llama": ("model", (*_SHAPE, *_DETAILS)),
}


def _micro_steps(tokens: int, *, _root_: DictConfig) -> int:
    """Resolve ${micro_steps:TOKENS}: the micro-steps by which a step has so many tokens."""
    cluster, train = _root_.cluster, _root_.train
    ranks = cluster.nodes * cluster.gpus_per_node // (cluster.tp * cluster.pp)
    each = ranks * train.batch_size * _root_.data.seq_len
    if tokens % each:
        raise ValueError(
            f"{ranks} ranks of train.batch_size={train.batch_size} sequences of "
            f"data.seq_len={_root_.data.seq_len} have {each:,} tokens, which does not divide "
            f"{tokens:,} tokens a step: set train.micro_steps, or another train.batch_size"
        )
    return int(tokens // each)


OmegaConf.register_new_resolver("micro_steps", _micro_steps, replace=True)


def bare_model(overrides: Sequence[str]) -> str:
    """Say that a large model's shape was chosen without an experiment; "" else."""
    chosen = {setting_of(one): one.partition("=")[2] for one in overrides}
    whole = EXPERIMENTS.get(chosen.get("model", ""))
    if whole is None or "experiment" in chosen or any(key.startswith("train.") for key in chosen):
        return ""
    return (
        f"model={chosen['model']} sets the model's shape alone; batch size, learning rate and "
        f"steps stay those of a tiny run: experiment={whole} sets all of them"
    )


def compose(overrides: list[str]) -> Config:
    """Compose the run of `zpp-lab train <overrides>`; ValueError lists the valid names."""
    overrides = [readable(override) for override in overrides]
    for override in overrides:
        if override.startswith(("hydra.", "hydra/", "+hydra.", "+hydra/")):
            raise ValueError(
                f"{override}: Hydra's settings work only with -m; leave it out, or add -m"
            )
    try:
        composed = _composed(overrides)
    except (HydraException, ValueError) as error:
        raise ValueError(explain(error, overrides)) from None
    _check_heeded(composed, overrides)
    return to_config(composed)


def _composed(overrides: list[str]) -> DictConfig:
    """Compose as Hydra does: files first, then values in their order. Hydra reads all of its own
    files each time, in a tenth of a second, and the arms of a study mostly choose the same
    files, so those are cached. Anything but choices and values goes to Hydra, and so does every
    mistake."""
    own, folder = own_files(), str(conf_dir())
    parsed = OverridesParser.create().parse_overrides(overrides)
    if swept := next((o.input_line for o in parsed if o.is_sweep_override()), ""):
        raise HydraException(f"'{swept}' requires --multirun")
    plain = all(o.type is OverrideType.CHANGE and o.package is None for o in parsed)
    choices = [o for o in parsed if _is_group(o.key_or_group)]
    if plain and all(isinstance(choice.value(), str) for choice in choices):
        pickled = _files(folder, *own, *(str(c.input_line) for c in choices))
        composed: DictConfig = pickle.loads(pickled)
        try:
            for one in parsed:
                if one not in choices:
                    OmegaConf.update(composed, one.key_or_group, one.value())
            return composed
        except OmegaConfBaseException:
            pass
    return _by_hydra(folder, *own, *overrides)


def own_files() -> list[str]:
    """Return the override by which Hydra reads the user's folder as well (`conf_dirs`). ValueError
    where --config-dir names none, or one with a file that conf/ has too."""
    named = bool(os.environ.get(OWN_CONF))
    for folder in conf_dirs()[1:]:
        if not folder.is_dir():
            raise ValueError(f"--config-dir {folder}: {missing(folder, 'folder')}; name a folder")
        for path in sorted(folder.rglob("*.yaml")) if named else ():
            name = path.relative_to(folder)
            if (conf_dir() / name).is_file():
                raise ValueError(f"--config-dir {folder}: conf/ has {name} too; rename yours")
        return [f"hydra.searchpath=[{quote(f'file://{folder.resolve()}')}]"]
    return []


def _by_hydra(folder: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir=folder, version_base="1.3"):
        return hydra_compose("config", [*overrides])


@lru_cache(maxsize=512)
def _files(folder: str, *overrides: str) -> bytes:
    """Return what Hydra composes, pickled: it is read in a third of the time of a deep copy."""
    return pickle.dumps(_by_hydra(folder, *overrides))


def _check_heeded(composed: DictConfig, overrides: Sequence[str]) -> None:
    """ValueError for a setting without effect: of another engine or model, or a beta2 next to its
    half-life. Behind ++ one of another engine passes."""
    given = {override.partition("=")[0] for override in overrides}
    for name in sorted(name[1:] for name in given if re.fullmatch(r"~\w+", name)):
        if name in {field.name for field in fields(Config)}:
            raise ValueError(
                f"~{name}: removing the group would reset all its settings to their defaults; "
                f"choose a file of it with {name}=NAME, or remove one setting with ~{name}.SETTING"
            )
    place = [name for name in given if re.fullmatch(r"cluster(\..+)?", name)]
    if "hardware" in given and place:
        raise ValueError(f"{place[0]}: hardware sets the cluster too; leave one of them out")
    if "train.beta2" in given and composed.train.beta2_tokens is not None:
        raise ValueError("train.beta2 and train.beta2_tokens both set beta2: leave one of them out")
    for owner, (group, names) in OWNERS.items():
        chosen = composed[group].name
        for name in names:
            if f"{group}.{name}" in given and chosen != owner:
                other = "the built-in decoder" if owner == "llama" else f"{group}={owner}"
                raise ValueError(
                    f"{group}.{name} is a setting of {other}, not of {group}={chosen}: leave it out"
                )


def to_config(composed: DictConfig) -> Config:
    """Turn a composed Hydra config into a validated `Config`."""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        raise ValueError(reason.partition("resolving interpolation: ")[2] or reason) from None
    return load(Config, values)


def explain(error: Exception, overrides: list[str]) -> str:
    """Reword Hydra's error: an override it cannot parse, an unknown key or option."""
    for override in overrides:
        if _parsed(override) is None:
            return (
                f"{override!r}: cannot be parsed; write name=value, and quote a value with "
                "spaces, commas or brackets, such as 'data.suffixes=[.h,.hpp]'"
            )
    key = _unknown_key(overrides)
    if key is not None and re.search("Could not (override|delete)", str(error)):
        if key.startswith("hydra"):
            return f"{key}: unknown setting of Hydra; zpp-lab train --cfg hydra lists them"
        return unknown_key(Config, key, GROUPS)
    missing = re.search(r"Could not find '([\w./-]+)/([^'/]*)'", str(error))
    if missing is not None:
        return _unknown_option(*missing.groups())
    chosen = re.search(r"Multiple values for (\w+)\.|force-add of .*'\+\+(\w+)=", str(error))
    if chosen is not None:
        group = chosen[1] or chosen[2]
        return f"{group}: this group is set already; choose a file with {group}=NAME, without +"
    for parsed in filter(None, map(_parsed, overrides)):
        if parsed.is_sweep_override() and "--multirun" in str(error):
            return f"{parsed.input_line}: several values; add -m to run each, or write [a,b]"
        group, value = parsed.key_or_group, parsed.value()
        if _is_group(group) and not isinstance(value, str | list | dict):
            return _unknown_option(group, written(value))
    again = re.search(r"An item is already at '([\w.]+)'", str(error))
    if again is not None:
        return f"+{again[1]}: this setting exists already; leave out the +"
    if "Error merging" in str(error):
        values = (o for o in map(_parsed, overrides) if o and not _is_group(o.key_or_group))
        if fault := next(filter(None, map(_misfit, values)), ""):
            return fault
    text = str(error).split("\nConfig search path")[0]
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _misfit(override: Override) -> str:
    """Say what an override whose value has another type than its setting should be, or ""."""
    *parents, last = override.key_or_group.split(".")
    if places := [i for i, part in enumerate([*parents, last]) if part.isdigit()]:
        whole = ".".join(parents[: places[0]])
        return f"{override.key_or_group}: {whole} is a list; set all of it, such as {whole}=[a,b]"
    values: dict[str, Any] = {last: override.value()}
    for part in reversed(parents):
        values = {part: values}
    try:
        load(Config, values)
    except ValueError as error:
        named = f"{override.key_or_group}="
        return next((line for line in str(error).splitlines() if line.startswith(named)), "")
    return ""


def _unknown_option(group: str, name: str) -> str:
    """Build the message for a file that a group of conf/ does not have."""
    chosen, slash, rest = group.partition("/")
    a_path = rest[:1] == "." or not _is_group(group)  # Hydra splits it elsewhere
    if slash and chosen != "hydra" and _is_group(chosen) and a_path:
        path = Path(rest or "/") / name
        own = "; a folder of transformers: model=hf model.path=FOLDER" if chosen == "model" else ""
        return (
            f"{chosen}={path}: expected a name, not a path; put the file at "
            f"DIR/{chosen}/{path.stem}.yaml, and add --config-dir DIR {chosen}={path.stem}{own}"
        )
    if extra := PLUGINS.get(f"{group}/{name}"):
        return f"{group}={name} needs a plugin of Hydra's: pip install 'zpp_lab[{extra}]'"
    if folder := EXAMPLES.get(f"{group}/{name}"):
        return (
            f"{group}={name} is a plugin; in a checkout: pip install ./{folder}, and add "
            f"--config-dir {folder}"
        )
    there = conf_names(group)
    if group.startswith("hydra/"):
        there = sorted({*there, *(p.rpartition("/")[2] for p in PLUGINS if p.startswith(group))})
    near = difflib.get_close_matches(name, there, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    other = "; any other: cluster.nodes=3 cluster.gpus_per_node=4" if group == "cluster" else ""
    listed = listed_names(group, there)
    return f"{group}={name}: unknown {group}.{hint} Valid names: {listed}{other}"


def _parsed(override: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def _unknown_key(overrides: list[str]) -> str | None:
    for override in overrides:
        parsed = _parsed(override)
        if parsed is None:
            continue
        key = parsed.key_or_group.split("@")[0]
        parents, _, last = key.rpartition(".")
        names = valid_names(Config, parents.split(".") if parents else [])
        if last not in names and not _is_group(key):
            return key
    return None


def _is_group(key: str) -> bool:
    """Return whether `key` is a group of conf/, such as lora."""
    return any((folder / key).is_dir() for folder in conf_dirs())


def study_names() -> list[str]:
    return conf_names("study")


def _mapping(path: Path) -> dict[str, Any]:
    """Read a study's file; ValueError that names the file when it holds no study."""
    values = parse_yaml(path, "correct it, or name another file")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping with name, question, arms and seeds")
    for name in ("overrides", "without"):
        if not isinstance(values.get(name, []), list):
            raise ValueError(f"{path}: {name}={values[name]!r}: use a list, such as [a, b]")
    return values


def load_study(
    name: str, changes: dict[str, Any] | None = None, overrides: Sequence[str] = ()
) -> StudyConfig:
    """Load the study of conf/study/NAME.yaml, or of a YAML file named by its path. Arms written as
    a grid are expanded, and `extends` is resolved; with `only` it has the arms named there, and no
    composite of others. NAME_mini is its rehearsal, by conf/mini.yaml. `changes` replace the
    study's own settings; `overrides` go to every run."""
    whole = name.removesuffix("_mini")
    if name in (there := study_names()) or whole not in there:
        whole = ""  # no rehearsal
    values = _inherited(_study_path(whole or name))
    if whole:
        values |= _as_rehearsal(values, whole, name)
    values |= changes or {}
    own = values.get("overrides", [])
    if "hardware" in map(setting_of, overrides):  # in place of what the study says of that
        own = [w for w in own if not re.match(r"engine=|cluster[.=]", str(w))]
    values["overrides"] = [*own, *overrides]
    _choose(name, values, values.pop("only", None))
    if whole:
        _shorten(values["arms"], values["overrides"])
    try:
        study = load(StudyConfig, values)
        study.check_folders()
    except ValueError as error:
        raise ValueError("\n".join(f"{name}: {line}" for line in str(error).split("\n"))) from None
    _check_heard(study, overrides)
    return study


def _choose(name: str, values: dict[str, Any], only: list[str] | None) -> None:
    """Expand the arms of `values` and keep those in `only`."""
    arms = values["arms"] = expand_arms(values.get("arms"))
    if only is None:
        return
    there = [arm["name"] for arm in arms]
    unknown = [arm for arm in only if arm not in there]
    if unknown:
        raise ValueError(f"{name}: only={', '.join(unknown)}: valid names: {', '.join(there)}")
    values["arms"] = [arm for arm in arms if arm["name"] in only]
    gone = {*there} - {*only}
    values["composites"] = [
        one
        for one in values.get("composites") or []
        if not (isinstance(one, dict) and gone & {*one.get("arms", ()), *one.get("minus", ())})
    ]


def _check_heard(study: StudyConfig, overrides: Sequence[str]) -> None:
    """ValueError for a setting that every arm and prepared run sets again, so that no run would
    have it, and for hardware where one has its own."""
    arms = ([*study.start_overrides, *arm.overrides] for arm in study.arms)
    runs = [*arms, *(one.overrides for one in study.prepare)]
    by_run = [{setting_of(override) for override in own} for own in runs]
    if "hardware" in map(setting_of, overrides):
        names = [*(arm.name for arm in study.arms), *(one.name for one in study.prepare)]
        for name, own in zip(names, by_run, strict=True):
            if place := next((w for w in own if re.match(r"engine$|cluster(\.|$)", w)), None):
                raise ValueError(
                    f"hardware: {name} of study {study.name} sets {place} already: leave hardware "
                    f"out, or write your own study (extends: {study.name})"
                )
    for override in overrides:
        if all(setting_of(override) in own for own in by_run):
            raise ValueError(
                f"{override}: every arm of study {study.name} sets this already; write your own "
                f"study (extends: {study.name}), or train one run with zpp-lab train"
            )


def _as_rehearsal(values: dict[str, Any], whole: str, name: str) -> dict[str, Any]:
    """Return what a study's rehearsal replaces; it reads and writes folders of its own."""
    mini, shape = _mapping(conf_dir() / "mini.yaml"), {f"model.{field}" for field in _SHAPE}
    own = [str(w).replace(f"runs/{whole}_", f"runs/{name}_") for w in values.get("overrides", [])]
    own = [override for override in own if setting_of(override) not in shape]
    kept = set()  # what the study has
    if any(setting_of(override) == "cluster.tp" for override in own):
        kept.add("model.loss_chunk")
    if any(override.startswith("experiment=rl_") for override in own):
        kept.add("train.micro_steps")  # as many completions as a rollout has
    words = [w for w in mini["overrides"] if setting_of(w) not in kept]
    found = mini | {"name": name, "overrides": [*own, *words]}
    if values.get("branch"):
        found["branch"] = values["branch"] | {"steps": _steps(words)}
        first = values.get("prepare") or []
        found["prepare"] = [one | {"overrides": _any_length(one)} for one in first]
    return found


def _shorten(arms: Any, overrides: Sequence[str]) -> None:
    """Shorten a rehearsal's arms that set their length: the shortest takes as many steps as the
    rehearsal, the others in proportion. Warm-up and evaluations are the rehearsal's."""
    listed = arms if isinstance(arms, list) else []
    own = [a for a in listed if isinstance(a, dict) and isinstance(a.get("overrides"), list)]
    few, steps = _steps(overrides), [_steps(arm["overrides"]) for arm in own]
    shortest = min(filter(None, steps), default=0)
    for arm, long in zip(own, steps, strict=True):
        more = [f"train.steps={long * few // shortest}"] if long else []
        arm["overrides"] = [*_any_length(arm), *more]


def _any_length(run: dict[str, Any]) -> list[Any]:
    """Return the overrides of an arm or a prepared run but for those of its length."""
    return [one for one in run.get("overrides", []) if setting_of(str(one)) not in _LENGTH]


def _steps(overrides: Sequence[Any]) -> int:
    """Return the last train.steps among `overrides`; 0 for none."""
    found = [re.fullmatch(r"train\.steps=(\d+)", str(override)) for override in overrides]
    return next((int(match[1]) for match in reversed(found) if match), 0)


def _study_path(name: str) -> Path:
    """Return the file that a study's name or path means; ValueError when there is none."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"{name}: {missing(path, 'file')}; name a study's YAML file")
        return path
    if name not in study_names():
        if Path(name).is_file():
            raise ValueError(f"{name}: a study's file ends with .yaml; rename it, or name another")
        near = difflib.get_close_matches(name, study_names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        size = re.fullmatch(r"(.+)_x(\d+)", name)
        if size and size[1] in study_names():
            hint = f" (for so many GPUs: {size[1]} hardware={size[2]}gpus)"
        raise ValueError(
            f"{name!r}: unknown study{hint}; valid names: {listed_names('study', study_names())}, "
            "or give a YAML file"
        )
    files = [folder / "study" / f"{name}.yaml" for folder in conf_dirs()]
    return next(path for path in files if path.is_file())


def _inherited(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a study's mapping, `extends: STUDY` resolved: this file's keys replace that study's,
    overrides are appended, arms are replaced by name or added, those in `without` left out."""
    values = _mapping(path)
    if "extends" not in values:
        return values
    if path in heirs:
        raise ValueError(f"{path}: extends itself through {heirs[-1].name}; remove one extends")
    try:
        extended = _study_path(str(values.pop("extends")))
    except ValueError as error:
        raise ValueError(f"{path}: extends: {error}") from None
    base = _inherited(extended, (*heirs, path))
    arms = _by_name(path, base.get("arms"))
    without = values.pop("without", [])
    unknown = [name for name in without if name not in arms]
    if unknown:
        raise ValueError(
            f"{path}: without: unknown arm {', '.join(unknown)}; valid names: {', '.join(arms)}"
        )
    own = _by_name(path, values.pop("arms", []))
    overrides = [*base.get("overrides", []), *values.pop("overrides", [])]
    kept = {name: same for name, same in arms.items() if name not in without} | own
    return base | values | {"overrides": overrides, "arms": list(chain(*kept.values()))}


def _by_name(path: Path, arms: Any) -> dict[str, list[Any]]:
    """Group arms by name; grids go by the name that they give their arms."""
    if not isinstance(arms, list) or not all(isinstance(a, dict) and "name" in a for a in arms):
        raise ValueError(f"{path}: arms: use a list of mappings, each with a name")
    named: dict[str, list[Any]] = {}
    for arm in arms:
        named.setdefault(str(arm["name"]), []).append(arm)
    return named


def run_dir(config: Config) -> Path:
    """Return `run.dir`, or runs/<recipe>/seed<seed>; ValueError for no folder's name."""
    if config.run.dir:
        return Path(config.run.dir)
    check_recipe_name(config.recipe.name)
    return Path("runs") / config.recipe.name / f"seed{config.seed}"


def check_recipe_name(name: str) -> None:
    """ValueError when a run without `run.dir` would leave the folder of all runs by this name."""
    try:
        check_name(name)
    except ValueError as error:
        raise ValueError(f"recipe.name={name!r}: {error}, or set run.dir") from None


def has_ended(config: Config) -> bool:
    """Return whether the run has its summary, which another start only returns."""
    return config.run.resume and (run_dir(config) / "summary.json").is_file()


def check_same_run(config: Config, folder: Path) -> None:
    """ValueError when `folder` holds a run with other settings, or none of its own any more."""
    path = folder / "config.yaml"
    if not path.is_file():
        left = [name for name in ("summary.json", "metrics.jsonl") if (folder / name).exists()]
        if left:
            raise ValueError(
                f"{folder} has {left[0]} but no config.yaml, so the run's settings are unknown: "
                "restore config.yaml from a copy, or set another run.dir"
            )
        return
    before = flat_config(read_yaml(path))
    now = flat_config(config)
    changed = differing(before, now)
    if changed:
        listed = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in changed[:5])
        raise ValueError(f"{folder} holds a run with other settings ({listed}): set a new run.dir")
