"""What a captured step reads and leaves beside its kernels; experiments/parity compares the steps
themselves, from a graph and without one, on GPUs."""

from __future__ import annotations

import torch

from zpp_lab.codecs import parameter_id
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.collectives.context import Clock, Memories, RowMemory
from zpp_lab.collectives.watchdog import GraphTransfers, Watchdog
from zpp_lab.config.wires import FORWARD, INTRA
from zpp_lab.engines.fsdp.graph import Words

CPU = torch.device("cpu")


def test_draws_of_a_graph_are_those_of_the_step_whose_keys_are_loaded() -> None:
    """One table serves all steps: ranks and rows stay, keys follow."""
    words, plain = Words(3, CPU, room=40), Clock(seed=3)
    captured = Clock(seed=3, drawn=words.draw)
    ids = (parameter_id("layers.0.up"), parameter_id("head"))
    made = {}
    for micro in (0, 1):
        captured.micro = micro
        made["rows", micro] = captured.rows_noise(INTRA, 2, range(4))
        made["own", micro] = captured.weights_noise(FORWARD, 1, 3)  # the same in each micro-step
    assert len(words.places) == 3
    for step in (0, 7, 2**40):
        words.load(step)
        plain.step = step
        for micro in (0, 1):
            plain.micro = micro
            for name, noise in (
                ("rows", plain.rows_noise(INTRA, 2, range(4))),
                ("own", plain.weights_noise(FORWARD, 1, 3)),
            ):
                found, wanted = (n.uniform(ids, 21, CPU) for n in (made[name, micro], noise))
                assert torch.equal(found, wanted), (step, micro, name)


def test_residuals_that_stay_where_they_are_get_the_same_values() -> None:
    key = INTRA, "weight"
    planned = {key: RowMemory(Memory("fp32"), rows=2, numel=8)}
    moved, stayed = Memories(planned, [0]), Memories(planned, [0])
    assert not stayed.steady(0)  # the first step makes them
    for step in range(4):
        values = torch.full((2, 8), float(step))
        for memories in (moved, stayed):
            memories.start(step)
            memories.room(key, 0, CPU).copy_(values)
        place = stayed.old[key].data_ptr() if step else None
        moved.commit()
        stayed.commit(in_place=step > 0)
        assert stayed.steady(step + 1)
        assert place in (None, stayed.old[key].data_ptr())
        assert torch.equal(moved.old[key], stayed.old[key])


def test_a_transfer_of_a_graph_that_does_not_end_is_named() -> None:
    transfers = GraphTransfers(CPU)
    transfers.begin()
    for label in ("weights_forward of unit a", "grads_intra of unit b"):
        transfers.mark(label)
    replays = [transfers.start(transfers.labels) for _ in range(2)]  # one behind the other
    transfers.seen[:] = 1
    assert [str(replay) for replay in replays] == [
        "the step's kernels",
        "weights_forward of unit a",
    ]
    transfers.seen[:1] = 2
    assert [str(replay) for replay in replays] == ["the step's kernels", "grads_intra of unit b"]


def test_a_capture_has_no_transfers_of_its_own_in_flight() -> None:
    watchdog = Watchdog(600.0, lambda message: None)
    transfers = watchdog.capturing = watchdog.graphs(CPU)
    with watchdog.watch("captured", CPU):
        assert not watchdog.flying
    assert transfers.labels == ["captured"]
    watchdog.close()
