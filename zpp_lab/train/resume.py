"""Where a run's checkpoints go, and from which state it resumes.

data.json, next to the checkpoints, records the run's data: a run that starts from them must read
text with the same tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from zpp_lab.config.data import DataConfig
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.data import PackedData, TokenData
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import END
from zpp_lab.engines.base import Engine
from zpp_lab.files import damaged, write_atomic
from zpp_lab.runs.checkpoint.index import DamagedError, check_format
from zpp_lab.runs.checkpoint.read import Saved, newest
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving
from zpp_lab.runs.metrics import read_object

if TYPE_CHECKING:
    from zpp_lab.engines.fsdp.engine import FsdpEngine


FILE = "data.json"
_KINDS = {"hash": str, "tokenizer": str, "vocab_size": int}


def note_data(folder: Path, cfg: DataConfig, data: TokenData | PackedData) -> None:
    """Write data.json: the data's hash, the tokenizer's identity and its number of tokens. A BPE
    of the run's own is kept next to it, for data.tokenizer=hf to read."""
    recorded = {"hash": data.hash, "tokenizer": data.tokenizer, "vocab_size": data.vocab_size}
    write_atomic(folder / FILE, json.dumps(recorded, indent=1) + "\n")
    if cfg.tokenizer == "bpe":
        write_atomic(folder / TOKENIZER, (data.folder / TOKENIZER).read_text(encoding="utf-8"))
        write_atomic(folder / "tokenizer_config.json", json.dumps({"eos_token": END}) + "\n")


def check_same_data(folder: Path, data: TokenData | PackedData, resumed: bool) -> None:
    """ValueError when the run in `folder` had other tokens before, as on another machine."""
    path = folder / FILE
    if not resumed or not path.is_file():
        return
    before = _recorded(folder)["hash"]
    if before != data.hash:
        raise ValueError(
            f"{folder} was trained on other tokens (data {before[:16]} there, {data.hash[:16]} "
            "now): resume on a machine with the same files, or start over in another folder"
        )


def check_start(named: str, start: Path, data: TokenData | PackedData) -> None:
    """ValueError when the run of the checkpoint `start`, set by `named`, had another tokenizer than
    `data`. One without its run's data.json cannot be checked, which a line on stderr says."""
    file = next((f / FILE for f in (start, *start.parents[:2]) if (f / FILE).is_file()), None)
    if file is None:
        print(f"{named}={start}: no {FILE}, so tokenizers are not compared", file=sys.stderr)
        return
    recorded = _recorded(file.parent)
    if recorded["tokenizer"] != data.tokenizer:
        raise ValueError(
            f"{named}={start} was trained with another tokenizer ({recorded['vocab_size']} "
            f"tokens, here {data.vocab_size}): set data.tokenizer as in its config.yaml; for a BPE "
            "of its own data.tokenizer=hf data.tokenizer_path=RUN_FOLDER"
        )


def check_reads(run: Path, data: TokenData | PackedData) -> None:
    """ValueError when the run in `run` had another tokenizer than `data`: a BPE learns from its
    corpus, which may have changed since. A run of an older version, without data.json, passes."""
    recorded = _recorded(run)
    if recorded and recorded["tokenizer"] != data.tokenizer:
        raise ValueError(
            f"{run} was trained with another tokenizer ({recorded['vocab_size']} tokens, here "
            f"{data.vocab_size}): evaluate it where its corpus is unchanged"
        )


def warn_of_change(run: Path, data: TokenData | PackedData) -> None:
    """Print a warning when the corpus of `run` reads as other tokens now."""
    recorded = _recorded(run)
    if recorded and recorded["hash"] != data.hash:
        print(
            f"{run} was trained on other tokens (data {recorded['hash'][:16]} there, "
            f"{data.hash[:16]} now): the losses are not held-out losses if some of these tokens "
            "were in its training text",
            file=sys.stderr,
        )


def vocab_size(run: Path) -> int | None:
    """Return how many tokens the tokenizer of the run in `run` has; None: not recorded."""
    return _recorded(run).get("vocab_size")


def _recorded(run: Path) -> dict[str, Any]:
    """Read data.json; {} where there is none. ValueError for one that lacks a key."""
    path = run / FILE
    found = read_object(path) if path.is_file() else {}
    for name, kind in _KINDS.items() if path.is_file() else ():
        if not isinstance(found.get(name), kind):
            raise damaged(path, f"{name}: {found.get(name, 'missing')!r}")
    return found


def open_store(config: Config, folder: Path, device: torch.device) -> Checkpoints:
    """Open the checkpoints in `folder`, as the engine writes them: of several processes all do."""
    train, engine = config.train, config.engine
    saving = Saving(
        int(train.checkpoint_host_gib * 2**30) if engine.name == "fsdp" else None,
        train.checkpoint_staging_mib * 2**20,
        train.checkpoint_weights_only,
        train.checkpoint_full_disk == "skip",
    )
    keep = max(1, train.keep_checkpoints)  # 0: none after the end
    offloads = Residence.of(config).offloads
    where = "cpu" if offloads or engine.name == "deepspeed" else device
    return Checkpoints(folder, keep, saving, engine.name in ("fsdp", "deepspeed"), where)


def resume(config: Config, engine: Engine, store: Checkpoints) -> int:
    """Load the run's own newest whole state, else the state that `run.start_from` names, or with
    model.start_optimizer `model.start`. Returns how many steps are done. Damaged checkpoints, those
    of weights only and those of another run are skipped, with a line on stderr; ValueError where
    there is no other."""
    done = _load_newest(config, engine, store) if config.run.resume else None
    if done is None and config.run.start_from:
        _begin_with(config, engine, store, "run.start_from", Path(config.run.start_from))
    if done is None and config.model.start and config.model.start_optimizer:
        _begin_with(config, engine, store, "model.start", Path(config.model.start))
    return done or 0


def _load_newest(config: Config, engine: Engine, store: Checkpoints) -> int | None:
    """Load the newest state and return its step; None without a checkpoint."""
    passed: Path | None = None  # the newest of those that hold weights only
    for saved in store.newest_first():
        origin = partial(saved.check_origin, store.folder.parent, config)
        if not store.checked(saved.path, partial(_agreed, store, origin)):
            continue
        if saved.weights_only:
            passed = passed or saved.path
        elif store.checked(saved.path, partial(_load, config, engine, store, saved)):
            _say_passed(passed, saved.path, store.rank)
            store.prune(saved.path)  # a kill may have come before it
            return saved.step
    if passed is not None:
        raise _no_way_on(passed)
    if store.damaged:
        raise ValueError(
            f"{store.folder} has no whole checkpoint of this run to resume from: restore one from "
            "a copy, or start over (run.resume=false)"
        )
    return None


def _agreed(store: Checkpoints, check: Callable[[], None]) -> bool:
    """Return True; where a check fails on some rank, raise its error on all of them."""
    store.ranks.all(check)
    return True


def _load(
    config: Config, engine: Engine, store: Checkpoints, saved: Saved, begins: bool = False
) -> bool:
    """Give the engine the state; DamagedError on all ranks where one of them finds damage."""
    engine.enter(0 if begins else saved.step)
    names = _remembered(config, engine, saved, begins, store.rank)
    if config.engine.name == "fsdp":
        cast("FsdpEngine", engine).load_checkpoint(saved, names)
    else:
        state = store.ranks.all(saved.state)
        kept = state.pop("memory", {})
        engine.load_state_dict(state | ({"memory": {n: kept[n] for n in names}} if names else {}))
    return True


def _remembered(config: Config, engine: Engine, saved: Saved, begins: bool, rank: int) -> list[str]:
    """Return which saved residuals the run loads. `begins`: with another run's state, which may
    lack some. ValueError where they are another recipe's or cluster's."""
    found = saved.memories()
    if not found:
        return []
    plan = engine.plan
    ranks = plan.recipe.cluster.world
    own = {".".join(k): (m.memory.dtype, (ranks, *m.shape)) for k, m in plan.memories.items()}
    if begins and (config.run.memory == "drop" or not own):
        why = "run.memory=drop" if own else "this recipe has no error-feedback residual"
        if rank == 0:
            print(f"{why}: the residuals in {saved.path} are not loaded", file=sys.stderr)
        return []
    other = next((name for name, kind in found.items() if own.get(name) != kind), None)
    wires, wanted = ({n.split(".")[0] for n in some} for some in (found, own))
    if other is None and (not begins or wires == wanted):  # a wire may have had no gradient yet
        return list(found)
    raise ValueError(
        f"{saved.path} holds residuals of another cluster, recipe or store "
        f"({other or 'other wires'}), and residuals cannot be resharded: begin without them "
        "(run.memory=drop with run.start_from or model.start_optimizer)"
    )


def _say_passed(passed: Path | None, path: Path, rank: int) -> None:
    """Print on rank 0 which steps are repeated, and why."""
    if passed is not None and rank == 0:
        print(
            f"checkpoint {passed} holds weights only (train.checkpoint_weights_only); resuming "
            f"from {path.name}, the newest whole state",
            file=sys.stderr,
        )


def _begin_with(config: Config, engine: Engine, store: Checkpoints, named: str, path: Path) -> None:
    """Load the state in `path`, a checkpoint or a run's folder; steps count from 0."""
    try:
        if (path / "checkpoints").is_dir():
            saved = _newest(named, path, store)
        else:
            check_format(path)
            saved = store.ranks.all(lambda: Saved(path))
        if saved.weights_only and named == "model.start":
            raise ValueError(
                f"model.start={path}: {saved.path.name} holds weights only "
                "(train.checkpoint_weights_only), so there is no optimizer's state: leave "
                "model.start_optimizer out, or use a whole checkpoint"
            )
        if saved.weights_only:
            raise _no_way_on(saved.path)
        _load(config, engine, store, saved, begins=True)
    except DamagedError as error:
        raise ValueError(f"{named}: {error}; use another checkpoint") from None


def _newest(named: str, run: Path, store: Checkpoints) -> Saved:
    try:
        return newest(run, store.ranks, "")
    except ValueError as error:
        raise ValueError(f"{named}={run}: {error}") from None


def _no_way_on(path: Path) -> ValueError:
    return ValueError(
        f"{path} holds weights only (train.checkpoint_weights_only), from which no run can "
        "resume: start over with run.resume=false, or begin another run from it "
        "(model.start=CHECKPOINT)"
    )
