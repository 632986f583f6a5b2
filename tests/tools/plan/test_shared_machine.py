"""A machine as one of several ranks on a GPU sees it."""

from __future__ import annotations

import pytest

from zpp_lab.config.compose import compose
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict

LARGE = ["engine=fsdp", "model=1_3b", "cluster=2x2", "recipe=zeropp", "data.seq_len=2048",
         "train.batch_size=1", "train.param_dtype=bf16", "train.reduce_dtype=bf16",
         "model.checkpoint_activations=true"]  # fmt: skip


def test_what_a_gpu_does_takes_longer_and_what_a_host_or_a_link_does_not() -> None:
    machine = load_machine("h200")
    shared = machine.shared(2)
    assert machine.shared(1) is machine
    assert shared.compute["eager"].seconds(1e12) == 2 * machine.compute["eager"].seconds(1e12)
    assert shared.intra.gather.seconds(1e8) == 2 * machine.intra.gather.seconds(1e8)
    assert shared.codec.each("encode", "8") == 2 * machine.codec.each("encode", "8")
    assert shared.memory_bytes_per_s == machine.memory_bytes_per_s / 2
    assert (shared.host, shared.inter) == (machine.host, machine.inter)
    with pytest.raises(ValueError, match="use 1 or more"):
        machine.shared(0)


def test_a_slow_link_hides_it_and_a_fast_one_does_not() -> None:
    config, machine = compose(LARGE), load_machine("h200")
    whole, shared = (
        {gbps: predict(config, one, gbps) for gbps in (12.0, 50.0)}
        for one in (machine, machine.shared(2))
    )
    for gbps, found in shared.items():
        assert found.compute_s == pytest.approx(2 * whole[gbps].compute_s)
        assert found.inter_s == pytest.approx(whole[gbps].inter_s, rel=0.02)
        assert found.step_s > whole[gbps].step_s
    assert shared[12.0].step_s < 1.05 * whole[12.0].step_s  # the link bounds both
    assert shared[50.0].step_s > 1.2 * whole[50.0].step_s
