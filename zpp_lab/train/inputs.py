"""Checks of a run before a token is read, a file written or a rank started.

`check_inputs` asks whether the files that it reads are there, `check_run` whether it would reach
its second step on this machine, with this recipe, cluster and model. Plain ZeRO-3 of the built-in
decoder is checked without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.compose import run_dir
from zpp_lab.config.data import TASKS, DataConfig
from zpp_lab.config.flat import stored_config
from zpp_lab.config.model import check_model_path
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import WIRES
from zpp_lab.files import (
    CONFIG,
    HELDOUT,
    METRICS,
    SUMMARY,
    below,
    looks_like_folder,
    missing,
    read_yaml,
)
from zpp_lab.runs.checkpoint.index import INDEX, DamagedError, check_format, listed, open_index
from zpp_lab.runs.provenance import check_commit
from zpp_lab.runs.wandb.mode import resolve

if TYPE_CHECKING:
    from zpp_lab.collectives.plan import Plan


# settings by which a model of the same parameters computes something else, or has others
_FUNCTION = (
    *("name", "options", "dim", "layers", "heads", "kv_heads", "ffn", "vocab_size"),
    *("tied_head", "scalar_head", "rope_theta", "norm_eps", "qk_norm"),
)
_MOMENTS = ("beta1", "beta2", "eps", "optimizer_state")  # by which AdamW's state means another one
_CHECKPOINT = "use a run's RUN/checkpoints/step-…"


def check_inputs(config: Config) -> None:
    """ValueError that lists every setting whose file or folder is missing, and a bad ZPP_COMMIT."""
    checks: list[Callable[[], object]] = [
        partial(check_model_path, config.model),
        *(partial(check, config) for check in (check_shape, _place, _start, _data, _rl)),
        check_commit,
    ]
    faults = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def check_shape(config: Config) -> None:
    """ValueError where the folder whose weights the built-in decoder takes has another shape."""
    model = config.model
    folder, ours = Path(model.path or ""), model.name == "llama"
    if ours and model.weights == "pretrained" and (folder / "config.json").is_file():
        from zpp_lab.models.llama_hf import check_config

        check_config(folder, model, model.vocab_size or None)


def _place(config: Config) -> None:
    """ValueError where the run's folder has a file or folder in the way of what the run writes."""
    run = run_dir(config)
    wrong = {run / "checkpoints": "folder"}
    wrong |= {run / name: "file" for name in (CONFIG, METRICS, HELDOUT, SUMMARY)}
    for path, kind in wrong.items():
        if path.exists() and path.is_dir() != (kind == "folder"):
            raise ValueError(f"run.dir={run}: {path.name} is not a {kind}; set another run.dir")


def _start(config: Config) -> None:
    start, first = config.model.start, config.run.start_from
    if start:
        path = Path(start)
        if not path.exists():
            raise ValueError(
                f"model.start={start}: {missing(path)}; name a run's folder, or a checkpoint in it"
            )
        if not (path / "checkpoints").is_dir() and not path.name.startswith("step-"):
            raise ValueError(
                f"model.start={start}: set a run's folder with "
                f"checkpoints{below(path, 'checkpoints')}, or a checkpoint (step-…)"
            )
        if config.model.start_optimizer:
            folder = path if (path / "checkpoints").is_dir() else path.parents[1]
            check_branch(config, _config_of(folder))
    own = run_dir(config) / "checkpoints"
    resumed = config.run.resume and own.is_dir() and any(own.iterdir())
    if first and not resumed:
        _check_checkpoint(f"run.start_from={first}", Path(first))


def _config_of(run: Path) -> Config:
    if not (run / CONFIG).is_file():
        raise ValueError(
            f"model.start_optimizer: {run} has no {CONFIG}, so its settings are unknown; set "
            "model.start to a run's folder, or leave model.start_optimizer out"
        )
    return stored_config(read_yaml(run / CONFIG))


def check_branch(config: Config, base: Config) -> None:
    """ValueError where the state of the run `base`, its optimizer's moments too, means something
    else to `config`: another model, or another optimizer. Rates and decay may differ, and the
    tokens a step where both give beta2 in tokens."""
    own, there = (
        {f"model.{name}": getattr(c.model, name) for name in _FUNCTION}
        | {f"train.{name}": getattr(c.optimization, name) for name in _MOMENTS}
        for c in (config, base)
    )
    if config.train.beta2_tokens and base.train.beta2_tokens:
        for c, settings in ((config, own), (base, there)):
            settings["train.beta2_tokens"] = c.train.beta2_tokens
            del settings["train.beta2"]
    differing = [f"{k} {there[k]!r} there, {own[k]!r} here" for k in own if own[k] != there[k]]
    if differing:
        raise ValueError(
            f"model.start_optimizer: the run {config.model.start} has other settings "
            f"({'; '.join(differing)}): set them to that run's values, or leave this out"
        )


def _check_checkpoint(named: str, path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{named}: {missing(path, 'checkpoint')}; {_CHECKPOINT}")
    check_format(path)
    if path.name.startswith("step-") or (path / INDEX).exists():
        try:
            open_index(path)
        except DamagedError as error:
            text = f"{named} is damaged or incomplete ({error.why}); {_CHECKPOINT}"
            raise ValueError(text) from None
        return
    newest = [*listed(path), *listed(path / "checkpoints")][-1:]
    hint = f" (did you mean {newest[0]}?)" if newest else ""
    raise ValueError(f"{named} is not a checkpoint{hint}; {_CHECKPOINT}")


def _rl(config: Config) -> None:
    """ValueError for an unknown reward, and for prompts that cannot be used."""
    if config.task != "rl":
        return
    from zpp_lab.train.rl.rewards import LEARNED, reward

    if config.rl.learned:
        from zpp_lab.train.rl.learned import check_learned  # imports torch

        check_learned(Path(config.rl.learned))
    for name in config.rl.rewards:
        if name != LEARNED:
            reward(name)
    if config.data.tokenizer != "bpe":  # which learns from its text first
        from zpp_lab.data.prompts import check_prompts

        check_prompts(config)


def _data(config: Config) -> None:
    cfg = config.data
    if cfg.path:
        _data_path(cfg, cfg.path)
    if cfg.tokenizer_path:
        path = Path(cfg.tokenizer_path).expanduser()
        if not path.exists():
            raise ValueError(
                f"data.tokenizer_path={cfg.tokenizer_path}: {missing(path, 'file or folder')}; "
                "name a tokenizer.json or its folder (AutoTokenizer.from_pretrained(NAME)."
                "save_pretrained(FOLDER) writes one)"
            )


def _data_path(cfg: DataConfig, text: str) -> None:
    path = Path(text).expanduser()
    if cfg.name in ("stdlib", *TASKS):
        raise ValueError(
            f"data.path={text}: data={cfg.name} does not read it; add data=text, data=jsonl "
            "(records) or data=installation (all Python source, and that folder)"
        )
    if path.exists() or (cfg.name == "hf" and not looks_like_folder(text)):
        return
    what = "file or folder" if cfg.name in ("text", "jsonl") else "folder"
    raise ValueError(f"data.path={text}: {missing(path, what)}; set the path of the text")


def check_run(config: Config, tracked: bool = True) -> None:
    """ValueError for what would end the run before, or in, its first step: missing files, tracking
    that this machine cannot do, a recipe that the cluster or this model does not allow. tracked:
    this process writes the run down; of several ranks one does."""
    check_inputs(config)
    if tracked and not config.run.study:  # a study sends its runs itself
        resolve(config.tracking.wandb)
    if tracked and config.tracking.tensorboard:
        from zpp_lab.runs.tensorboard import check_installed

        check_installed()
    check_recipe(config)
    planned(config)


def check_recipe(config: Config) -> None:
    """ValueError for an unknown codec or one that refuses its settings, and for a recipe that the
    cluster or the engine does not allow. Reads no file."""
    if _plain(config):
        return
    from zpp_lab.engines.build import check_engine

    check_engine(config)


def planned(config: Config) -> list[tuple[int, Plan]] | None:
    """Return steps and plan of each of the run's phases, None where nothing could be wrong.
    ValueError where the model gets less than the recipe asks for, or cannot be trained."""
    if _plain(config):
        return None
    from zpp_lab.engines.build import plans_of

    return plans_of(config)


def _plain(config: Config) -> bool:
    """Return whether only FSDP2's own collectives, of the whole built-in decoder, are asked for."""
    recipe, model, cluster = config.recipe, config.model, config.cluster
    codecs = any(recipe.wire(wire) != CodecConfig() for wire in WIRES)
    listed = recipe.exempt.names or recipe.rules or recipe.phases
    asked = codecs or listed or "node" in recipe.parts or recipe.copied
    ours = config.engine.name != "deepspeed" and model.name == "llama" and not model.lora.on
    return ours and not asked and cluster.tp == cluster.pp == 1
