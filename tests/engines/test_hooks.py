"""Hooks that tell the engine what a backward reached, and whose gradients a reduction brings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zpp_lab.engines.fsdp.gradients import Present
from zpp_lab.engines.fsdp.prefetch import when_reached


@pytest.mark.parametrize("used", [[0], [0, 1], [1]])
def test_a_hook_is_called_once_in_each_backward_that_comes_by(used: list[int]) -> None:
    x = torch.ones(3, requires_grad=True)
    outputs, found = [x * (i + 2) for i in range(max(used) + 1)], list[Tensor]()
    when_reached(outputs, found.append)
    loss = torch.stack([outputs[i] for i in used]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [each.tolist() for each in found] == 2 * [[1.0, 1.0, 1.0]]
    (x * 2).sum().backward()
    assert len(found) == 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

    def forward(self, which: str) -> Tensor:
        parts = {"a": self.a, "b": self.b}
        return torch.stack([parts[name].sum() * (i + 1) for i, name in enumerate(which)]).sum()


def test_a_reduction_knows_whose_gradients_it_has() -> None:
    """Whatever came before: the same parameters, others, another order, none."""
    model = Two()
    present = Present(model, model, ("a", "b"))
    for which in ("ab", "ab", "ba", "b", "ab", "a", "a"):
        model(which).backward()
        own = [p.grad for p in (model.a, model.b) if p.grad is not None]
        names, grads = present.take(own)
        assert names == tuple(sorted(which))
        assert all(g is p for g, p in zip(grads, own, strict=True))
        model.zero_grad()
    assert present.take([])[0] == ()
    assert present.taken == [("a", "b")] * 3 + [("b",), ("a", "b"), ("a",), ("a",), ()]
    model("ab").backward()
    with pytest.raises(AssertionError, match="other gradients"):
        present.take([torch.ones(3), torch.ones(2)])
