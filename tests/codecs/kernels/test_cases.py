"""The random cases that kernels are checked with: from any start they can be made, and they ask of
the operators only what these take. A GPU is not needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.codecs.kernels import cases
from tests.experiments.scripts import loaded
from zpp_lab.codecs.kernels import reference
from zpp_lab.codecs.kernels.table import hop, incoming, outgoing

STARTS = (0, 1000, 7_770_000, 123_456_789, 2**40)


def checked(name: str) -> Any:
    """The reference's operator behind the checks of payload rows in cuda/bindings/fill.h."""

    def call(*args: Any) -> Any:
        for payload in (a for a in args if isinstance(a, Tensor) and a.dtype == torch.uint8):
            assert payload.dim() in (2, 3)
            if payload.numel():
                assert payload.stride(-1) == 1
                assert payload.data_ptr() % 16 == 0
                leading = zip(payload.shape[:-1], payload.stride()[:-1], strict=True)
                assert all(size == 1 or stride % 16 == 0 for size, stride in leading)
        return getattr(reference, name)(*args)

    return call


NAMES = ("encode", "encode_update", "decode", "decode_sum", "reduce", "encode_sums", "finish_sums")
OPERATORS = SimpleNamespace(**{n: checked(n) for n in (*NAMES, "decode_sum_encode")})


def run(seeds: range) -> None:
    for seed in seeds:
        case = cases.random_case(seed)
        assert outgoing(case.before).kernel or not case.before.numel
        assert incoming(case.before).others == hop(case.before, case.after).others == ()
        cases.check_case(case, OPERATORS, "cpu")


@pytest.mark.parametrize("start", STARTS)
def test_cases_of_any_start(start: int) -> None:
    run(range(start, start + 12))


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_many_cases_of_any_start(start: int) -> None:
    run(range(start + 12, start + 600))


@pytest.mark.parametrize(
    ("seconds", "said", "code"),
    [
        ("600", "6 cases from [0, 7770000], 0 failed, ", 0),
        ("-1", "0 cases from [0, 7770000], 0 failed, 6 not run, ", 1),
    ],
)
def test_every_case_is_counted(
    seconds: str,
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that no time was left for are no success."""
    words = ["--cpu", "--jobs", "1", "--cases", "3", "--start", "0", "7770000"]
    monkeypatch.setattr("sys.argv", ["check.py", *words, "--seconds", seconds])
    assert loaded("experiments/kernels/check.py").main() == code
    assert capsys.readouterr().out.startswith(said)


def test_an_operators_error_is_a_failure_of_its_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("rows must start at multiples of 16 bytes")

    monkeypatch.setattr(reference, "finish_sums", fail)
    words = ["--cpu", "--jobs", "1", "--cases", "2", "--start", "7770000"]
    monkeypatch.setattr("sys.argv", ["check.py", *words])
    assert loaded("experiments/kernels/check.py").main() == 1
    told = capsys.readouterr().out
    assert told.count("multiples of 16 bytes\nseed 777000") == 2
    assert "2 cases from [7770000], 2 failed" in told
