"""The choice of implementation, and what a machine without a GPU says."""

from __future__ import annotations

import pytest
import torch

from zpp_lab.codecs import BlockCodec, RawCodec, kernels
from zpp_lab.codecs.base import CodecBase
from zpp_lab.codecs.kernels import backend, reference
from zpp_lab.codecs.kernels.table import hop, incoming, outgoing, signed
from zpp_lab.codecs.layout import Layout

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_state", backend._State())


def test_an_unknown_backend_names_the_choices() -> None:
    with pytest.raises(ValueError, match="auto, cuda, reference"):
        kernels.configure("triton")  # type: ignore[arg-type]


@no_gpu
def test_a_forced_choice_that_cannot_be_met_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"ops\.backend=auto"):
        kernels.configure("cuda")
    assert kernels.status()["problem"]


@no_gpu
def test_auto_serves_cpu_tensors_by_the_reference() -> None:
    layout = Layout.build(["w"], [100], [BlockCodec(4, 64)])
    x, got, want = torch.randn(100), *torch.zeros(2, 1, layout.nbytes, dtype=torch.uint8)
    kernels.encode(layout, [x], None, got)
    reference.encode(layout, [x], None, want)
    assert torch.equal(got, want)
    assert kernels.status() == {"backend": "auto", "kernels": False, "problem": backend._no_gpu()}


def test_forced_cuda_refuses_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._state, "backend", "cuda")
    layout = Layout.build(["w"], [8], [BlockCodec(4, 64)])
    with pytest.raises(ValueError, match=r"engine\.device=cuda or ops\.backend=auto"):
        kernels.encode(
            layout, [torch.zeros(8)], None, torch.zeros(1, layout.nbytes, dtype=torch.uint8)
        )


class Foreign(CodecBase):
    def nbytes(self, numel: int) -> int:
        return 16


def test_tables_hold_what_the_kernels_read() -> None:
    codecs = [
        BlockCodec(6, 128, False, "stochastic", "bf16", 64, True),
        Foreign(),
        RawCodec(torch.bfloat16),
    ]
    layout = Layout.build(["a", "b", "c"], [100, 7, 9], codecs)
    table = outgoing(layout)
    assert table.kernel == (0, 2)
    assert table.others == (1,)
    fields = bytes(int(table.rows[0, 11]).to_bytes(8, "little"))
    assert fields == bytes((0, 6, 7, 0, 1, 6, 1, 1))
    assert table.rows[1, 11] == 1
    assert table.rows[1, 13] == 1
    assert table.rows[0, 2] == 128
    assert incoming(layout).rows[0, 1] == 128
    assert outgoing(layout) is table
    other = Layout.build(["a", "b", "c"], [100, 7, 9], codecs)
    assert hop(other, layout).rows[0, 1:3].tolist() == [128, 128]


def test_keys_wrap_to_int64() -> None:
    assert signed(2**64 - 1) == -1
    assert signed(5) == 5
