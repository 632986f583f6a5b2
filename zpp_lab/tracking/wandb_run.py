"""One wandb run being written: the only file that talks to wandb's library.

Everything wandb would gather by itself (code, git, console, packages, machine)
is switched off: the run folder has it, and a study pays for it in every run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from zpp_lab.tracking.folder import RunFolder
from zpp_lab.tracking.jsonl import Record
from zpp_lab.tracking.wandb_mode import Mode


class WandbRun:
    """Opens the wandb run that belongs to a run folder, or opens it again.

    Online it goes on after the last step that the server has. The server can be asked,
    as it gets the steps in order and the summary after them: it never has a hole.

    Raises wandb's errors and TimeoutError; `forget` must follow each of them.
    """

    def __init__(self, folder: RunFolder, mode: Mode) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports to third parties
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        shutil.rmtree(folder.path / "wandb", ignore_errors=True)  # of an earlier attempt
        config = folder.config()
        self._run = wandb.init(
            **_identity(folder, config),
            config=config,
            mode="online" if mode == "online" else "offline",
            resume="allow" if mode == "online" else None,
            dir=str(folder.path),
            settings=_settings(float(_tracking(config).get("timeout_seconds", 60.0))),
        )
        # 0 for a run from its start, else the step after the server's last one.
        self.last_step = self._run.starting_step - 1
        self.url: str | None = self._run.url if mode == "online" else None
        self.folder = os.path.relpath(os.path.dirname(self._run.dir), folder.path)

    def log(self, records: Iterable[Record]) -> None:
        """Send the records of the steps that wandb does not have yet."""
        for record in records:
            step = record["step"]
            if step > self.last_step:
                self._run.log(dict(_flat(record)), step=step)
                self.last_step = step

    def finish(self, outcome: dict[str, Any] | None) -> None:
        """Send the summary and wait, for a bounded time, until the server has it all.

        `outcome` is None for a run that was killed; else its names go below `final/`,
        as wandb's own summary holds the last step's values under the plain names.
        TimeoutError when time is up.
        """
        if outcome is not None:
            self._run.summary.update(dict(_flat(outcome, "final/")))
        finished = outcome is not None and outcome.get("outcome") == "finished"
        self._run.finish(exit_code=0 if finished else 1)


def forget() -> None:
    """End wandb's own helper process; what it still held is in the run folder anyway."""
    if "wandb" in sys.modules:
        with contextlib.suppress(Exception):  # the helper may be the one that crashed
            sys.modules["wandb"].teardown(exit_code=1)


def _identity(folder: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
    run, tracking = config.get("run") or {}, _tracking(config)
    arm, seed = run.get("arm"), config.get("seed")
    return {
        "id": folder.state()["id"],
        "name": run.get("name") or (f"{arm}-seed{seed}" if arm else folder.path.name),
        "project": tracking.get("project", "zpp_lab"),
        "entity": tracking.get("entity"),
        "group": tracking.get("group") or run.get("study"),
        "job_type": arm or (config.get("recipe") or {}).get("name"),
        "tags": tracking.get("tags") or None,
    }


def _tracking(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("tracking") or {}


def _settings(timeout: float) -> Any:
    import wandb

    return wandb.Settings(
        init_timeout=timeout,
        finish_timeout=timeout,
        finish_timeout_raises=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        silent=True,
        symlink=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_disable_viewer=True,
        x_save_requirements=False,
    )


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by slashes, such as bytes/weights_forward/inter."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
