"""How a link's packets are steered, without nodes."""

from __future__ import annotations

import os

import pytest

from zpp_lab.tools.links import network


@pytest.mark.parametrize(
    ("processors", "mask"),
    [(1, "00000001"), (2, "00000003"), (32, "ffffffff"), (36, "0000000f,ffffffff")],
)
def test_all_processors_are_named_as_the_kernel_reads_them(processors: int, mask: str) -> None:
    assert network._mask(processors) == mask


def test_a_namespace_without_the_interface_is_told_apart() -> None:
    assert network.keep_order(os.getpid(), "zpp-none") is False
