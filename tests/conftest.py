"""The same tests on every machine and at every run: in whatever process and order they come."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.train.launch.fake_mps import fake_mps

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums depend on it; torch is imported after this
os.environ["COLUMNS"] = "80"  # whatever terminal the tests are started from
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

# A slow machine is no fault, and two runs of one commit must try the same examples.
# `pytest --hypothesis-profile=default` looks further.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """No test inherits what an earlier one in its process has drawn or set."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def one_server_of_forks() -> Iterator[None]:
    """A process has one fork server, and who starts it first says what it imports.

    Where many tests share it, as in a worker of pytest-xdist, that is the list of `forks()`
    whatever comes first: a rank of a server without torch would import it anew, in seconds.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    from tests.engines.fsdp_world import forks  # it imports torch
    from zpp_lab.train.footprint import settled

    forks()
    with settled(), pytest.MonkeyPatch.context() as patch:  # each run would settle all modules
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        yield


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the recorder in MPS's place, which is first on PATH."""
    folder = tmp_path / "bin"
    fake_mps(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
