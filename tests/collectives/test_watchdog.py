"""A transfer that hangs is named; one that ends, or fails, is not."""

from __future__ import annotations

import threading

import pytest
import torch

from zpp_lab.collectives.watchdog import CollectiveError, Watchdog, meeting, under_way

CPU = torch.device("cpu")


def test_names_the_transfer_that_hangs() -> None:
    said: list[str] = []
    heard = threading.Event()
    watchdog = Watchdog(0.2, lambda message: (said.append(message), heard.set())[0])
    with watchdog.watch("grads_intra of unit layers.3 (local)", CPU):
        assert heard.wait(240)
    watchdog.close()
    assert len(said) == 1
    assert said[0].startswith("grads_intra of unit layers.3 (local) has not finished after 0.2 s")


def test_the_time_of_a_transfer_behind_another_begins_after_that() -> None:
    watchdog = Watchdog(600.0, lambda message: None)
    watchdog.stop.set()  # the test looks by itself
    with watchdog.watch("one", CPU) as one, watchdog.watch("two", CPU) as two:
        watchdog.moved = one.began = two.began = two.began - 1000.0  # began 1,000 s ago
        assert watchdog.late() == "one"
        one.ended = True
        assert watchdog.late() is None
        watchdog.moved -= 1000.0
        assert watchdog.late() == "two"
    watchdog.close()


def test_finished_and_failed_transfers_are_forgotten() -> None:
    watchdog = Watchdog(600.0, lambda message: None)
    with watchdog.watch("one", CPU):
        pass
    with (
        pytest.raises(CollectiveError, match=r"^rank 3: two failed: gone$"),
        watchdog.watch("two", CPU, rank=3),
    ):
        raise RuntimeError("gone")
    assert all(t.finished() for t in watchdog.flying)
    watchdog.close()


def test_others_learn_how_far_this_process_is_and_what_it_waits_for() -> None:
    before = under_way()[0]
    watchdog = Watchdog(600.0, lambda message: None)
    with watchdog.watch("one", CPU):
        assert under_way() == (before + 1, "one")
        with watchdog.watch("two", CPU):
            assert under_way() == (before + 2, "one")  # the oldest
    assert under_way() == (before + 2, "")
    with meeting("a checkpoint"):
        assert under_way() == (before + 2, "a checkpoint")
    with pytest.raises(CollectiveError), watchdog.watch("three", CPU):
        raise RuntimeError("gone")
    assert under_way() == (before + 3, "three failed")  # also when it is over
    watchdog.close()
