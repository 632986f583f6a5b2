"""Are the files that a run reads there? Asked before anything is read, started or waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zpp_lab.checkpoint.index import INDEX, DamagedError, check_format, listed, open_index
from zpp_lab.config import Config, DataConfig, ModelConfig
from zpp_lab.folders import below, looks_like_folder, missing, need_folder
from zpp_lab.machine import check_commit
from zpp_lab.runconfig import run_dir

_CHECKPOINT = "name one of a run's folder, RUN/checkpoints/step-…"
DOWNLOAD = "download the model first (hf download NAME --local-dir FOLDER), or mend the path"


def check_inputs(config: Config) -> None:
    """ValueError that lists every setting whose file or folder is not there, and what to do; and
    a ZPP_COMMIT that is no commit, which a result would name."""
    faults = [
        fault for check in (_model, _start, _data, _commit) if (fault := _fault(check, config))
    ]
    if faults:
        raise ValueError("\n".join(faults))


def _fault(check: Callable[[Config], None], config: Config) -> str | None:
    try:
        check(config)
    except ValueError as error:
        return str(error)
    return None


def _commit(_: Config) -> None:
    check_commit()


def _model(config: Config) -> None:
    check_model_path(config.model)


def check_model_path(cfg: ModelConfig) -> None:
    """ValueError when `model.path` is read as a folder and is no model's."""
    if not cfg.path:
        return
    path, named = Path(cfg.path), f"model.path={cfg.path}"
    if cfg.weights == "pretrained":
        if not path.is_dir():
            raise ValueError(
                f"model.weights=pretrained reads a folder, and {named} is none: {missing(path)}; "
                f"{DOWNLOAD}"
            )
    elif path.is_file() and path.suffix == ".json":
        return  # a config by itself
    elif looks_like_folder(cfg.path):
        need_folder(named, path, DOWNLOAD)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"{named} has no config.json{below(path, 'config.json')}: name the folder that "
            "transformers, or zpp-lab export --to hf, has written"
        )


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
                f"model.start={start} is no run's folder with checkpoints"
                f"{below(path, 'checkpoints')}, and no checkpoint (step-…) of one; name one"
            )
    own = run_dir(config) / "checkpoints"
    going_on = config.run.resume and own.is_dir() and any(own.iterdir())
    if first and not going_on:
        _check_checkpoint(f"run.start_from={first}", Path(first))


def _check_checkpoint(named: str, path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{named}: {missing(path, 'checkpoint')}; {_CHECKPOINT}")
    check_format(path)
    if path.name.startswith("step-") or (path / INDEX).exists():
        try:
            open_index(path)
        except DamagedError as error:
            text = f"{named} is damaged or not whole ({error.why}); {_CHECKPOINT}"
            raise ValueError(text) from None
        return
    newest = [*listed(path), *listed(path / "checkpoints")][-1:]
    hint = f" (did you mean {newest[0]}?)" if newest else ""
    raise ValueError(f"{named} is no checkpoint{hint}; {_CHECKPOINT}")


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
    if cfg.name == "stdlib":
        raise ValueError(
            f"data.path={text}: data=stdlib does not read it; add data=text, data=jsonl (records) "
            "or data=installation (all Python source, and that folder)"
        )
    if path.exists() or (cfg.name == "hf" and not looks_like_folder(text)):
        return
    what = "file or folder" if cfg.name in ("text", "jsonl") else "folder"
    raise ValueError(f"data.path={text}: {missing(path, what)}; name the one with the text")
