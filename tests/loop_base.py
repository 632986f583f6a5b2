"""What the jobs of `loop_jobs.py` share: a model, its data and recipes, and a loop as users write
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from zpp_lab.api import shard
from zpp_lab.config.load import load
from zpp_lab.config.schema import RecipeConfig
from zpp_lab.files import conf_dir


def chosen(name: str, **changes: dict[str, Any]) -> RecipeConfig:
    """A recipe of conf/ with other settings; by Hydra it would take a rank a while."""
    values = yaml.safe_load((conf_dir() / "recipe" / f"{name}.yaml").read_text())
    for group, own in changes.items():
        values[group] = {**values.get(group, {}), **own}
    return load(RecipeConfig, values)


BLOCKS = {"block_size": 16}
SMALL = {"weights": BLOCKS, "grads": BLOCKS}
RECIPES = {
    "zero3": chosen("zero3"),
    "zero3_reordered": chosen("zero3_reordered"),
    "zeropp": chosen("zeropp", weights=BLOCKS, grads={**BLOCKS, "rounding": "stochastic"}),
    "amsp_node": chosen("amsp_node"),
    "w4_diff": chosen("w4_diff", weights_update=BLOCKS),
    "sdp4bit": chosen("sdp4bit", weights_update=BLOCKS),
    "loco": chosen("loco", **SMALL),
    "w8_then_w4": chosen("w8_then_w4", **SMALL),
}
STEPS = 3
CPU = torch.device("cpu")


@dataclass
class World:
    """Where the jobs of this process run."""

    shape: str = "2x2"
    device: torch.device = CPU
    width: int = 8  # of Net


WORLD = World()


class Net(nn.Module):
    def __init__(self, root: bool = True) -> None:
        """root: whether the root has parameters of its own."""
        super().__init__()
        wide = WORLD.width
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(2))
        self.head = nn.Linear(wide, 1) if root else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.head(x) if self.head is not None else x).square().mean()

    def score(self, x: Tensor) -> Tensor:
        return Net.forward(self, x)


def data(step: int, micro: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(4, WORLD.width, generator=made).to(WORLD.device)


def new(name: str, seed: int = 0, model: Callable[[], nn.Module] = Net, **more: Any) -> Any:
    """A model, sharded, and an optimizer that leaves no trace in version counters."""
    torch.manual_seed(seed)
    made = model()
    sharded = shard(made, RECIPES[name], WORLD.shape, steps=20, **more)
    return made, sharded, torch.optim.AdamW(made.parameters(), lr=0.02, foreach=True)


def train(
    model: Any,
    optimizer: Any,
    steps: Iterator[int] | range = range(STEPS),
    forward: Callable[[Tensor], Tensor] | None = None,
    between: Callable[[int], None] = lambda step: None,
    micros: int = 1,
) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in steps:
        for micro in range(micros):
            loss = (forward or model)(data(step, micro))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return losses


def whole(model: nn.Module) -> Net:
    """A copy that nobody has sharded."""
    made = Net().to(WORLD.device)
    made.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
    return made


@torch.no_grad()
def gathers_masters(model: nn.Module) -> bool:
    """Whether a forward computes with the masters' own bits."""
    masters = {n: p.full_tensor() for n, p in model.state_dict().items()}
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, _: Any, name: str) -> None:
        found.update({f"{name}.{n}": p.clone() for n, p in module.named_parameters()})

    parts = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    hooks = [m.register_forward_pre_hook(partial(look, name=n)) for n, m in parts]
    model(data(97))
    for hook in hooks:
        hook.remove()
    assert found.keys() == masters.keys()
    return all(found[n].equal(master) for n, master in masters.items())


def everyone(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def refused(job: Callable[[], Any], *kinds: type[Exception]) -> list[list[str]]:
    """Of each rank, the kind and the text of its error."""
    try:
        job()
        return everyone(["", ""])
    except kinds as error:
        return everyone([type(error).__name__, str(error)])
