"""What the whole suite shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.engines.fsdp_world import forks


@pytest.fixture(scope="session", autouse=True)
def one_server_of_forks() -> Iterator[None]:
    """A process has one fork server, and who starts it first says what it imports.

    Where many tests share it, as in a worker of pytest-xdist, that is the list of `forks()`
    whatever comes first: a rank of a server without torch would import it anew, in seconds.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        yield
