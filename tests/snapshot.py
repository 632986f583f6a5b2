"""What today's code predicts and calls runs: bytes, memory and names, to compare after a change.

python -m tests.snapshot --against FILE --write    # before a refactoring
python -m tests.snapshot --against FILE            # after it, on any machine
python -m tests.snapshot --against FILE --cases 'recipes/zeropp*' '*memories*'

recipes      every shipped recipe on every shipped cluster
studies      every arm of the study files under experiments/
runs         every arm of the archives under experiments/, of its first seed
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tests.golden import arguments, picked, settle
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.flat import arm_name, every_setting, stored_config
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of
from zpp_lab.files import conf_names
from zpp_lab.runs.wandb.identity import shown_config
from zpp_lab.train.memory.forecast import host_bytes, memory_need

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
BASE = ["engine=fsdp", "model=10m", "train.micro_steps=2", "train.param_dtype=bf16"]
Run = Callable[[], Config | dict[str, Any]]  # or what a config.yaml holds
_compose = lru_cache(lambda *words: compose([*words]))


def recipes() -> Iterator[tuple[str, Run]]:
    named = (name for name in conf_names("recipe") if name != "base")
    for recipe, cluster in product(named, conf_names("cluster")):
        yield f"{recipe} on {cluster}", partial(_on_cluster, recipe, cluster)


def _on_cluster(recipe: str, cluster: str) -> Config:
    """Each file composed once, which takes most of the time."""
    own = _compose(f"cluster={cluster}").cluster
    return replace(_compose(*BASE, f"recipe={recipe}"), cluster=own)


def studies() -> Iterator[tuple[str, Run]]:
    for path in sorted(EXPERIMENTS.rglob("*.yaml")):
        study, place = load_study(str(path)), path.relative_to(EXPERIMENTS)
        for arm in study.arms:
            words = [*study.overrides, *study.start_overrides, *arm.overrides]
            yield f"{place} {arm.name}", partial(compose, words)


def runs() -> Iterator[tuple[str, Run]]:
    for path in sorted(EXPERIMENTS.rglob("*.tar.*")):
        with tarfile.open(path) as archive:
            found = {m.name: m for m in archive if m.name.endswith("/config.yaml")}
            arms = {name.rpartition("/seed")[0] or name: name for name in sorted(found)[::-1]}
            for arm, name in sorted(arms.items()):
                file = archive.extractfile(found[name])
                assert file is not None
                yield f"{path.relative_to(EXPERIMENTS)} {arm}", partial(yaml.safe_load, file.read())


PARTS = {"recipes": recipes, "studies": studies, "runs": runs}


def described(run: Run) -> dict[str, Any]:
    """A refusal by its class alone: texts may change."""
    found: dict[str, Any] = {}
    try:
        held = run()
        stored = every_setting(held) if isinstance(held, Config) else held
        config = held if isinstance(held, Config) else stored_config(held)
        found |= {"arm": arm_name(stored), "wires": shown_config(stored)["wires"]}
        return found | foreseen(config)
    except (ValueError, OSError) as error:  # also a model of transformers that is not here
        return found | {"refused": type(error).__name__}


def foreseen(config: Config) -> dict[str, Any]:
    if config.engine.name == "deepspeed":
        return {}
    sent = {p.first: plan_of(p.config).step_bytes() for p in config.phases}
    need = memory_need(config)
    return {
        "bytes": {str(k): {w: list(t) for w, t in own.items()} for k, own in sent.items()},
        "memory": need and [need.nbytes, need.each, need.at_least],
        "host": host_bytes(config),
    }


def main(words: list[str] | None = None) -> int:
    parser = arguments("python -m tests.snapshot", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    asked = parser.parse_args(words)
    if asked.against is None or not (asked.write or asked.against.exists()):
        parser.error(f"--against {asked.against}: name a file, and record it with --write first")
    found: dict[str, Any] = {}
    for part in asked.parts or PARTS:
        every = dict(PARTS[part]())
        found[part] = {n: described(every[n]) for n in picked(part, every, asked.cases)}
    if not any(found.values()):
        parser.error(f"--cases {asked.cases}: no such case")
    return settle(found, asked.against, asked.write, bool(asked.cases))


if __name__ == "__main__":
    sys.exit(main())
