"""`zpp-lab train -m`: Hydra's multirun, with its sweepers and launchers.

Every job gets a run folder of its own below one sweep folder, named by what was swept, so that
`zpp-lab report` can group the seeds of an arm.
"""

from __future__ import annotations

import os
import sys
import time

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from zpp_lab.compose import to_config
from zpp_lab.paths import conf_dir


def multirun(overrides: list[str]) -> int:
    """Run Hydra's multirun over `overrides`; returns 0, or raises what a job raised."""
    os.environ.setdefault("ZPP_SWEEP_DIR", time.strftime("runs/sweep-%Y%m%d-%H%M%S"))
    argv, sys.argv = sys.argv, ["zpp-lab train", "--multirun", *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_job)()
    finally:
        sys.argv = argv
    return 0


def _job(composed: DictConfig) -> float:
    """One job; returns the held-out loss, for sweepers that optimize."""
    from zpp_lab.trainer import run

    settings = HydraConfig.get()
    arm = settings.job.override_dirname or str(composed.recipe.name)
    with open_dict(composed):
        composed.run.arm = composed.run.arm or arm
        folder = f"{settings.sweep.dir}/{arm.replace('/', '_')}/seed{composed.seed}"
        composed.run.dir = composed.run.dir or folder
    return float(run(to_config(composed))["heldout_loss"])
