"""Which bytes lose their whole embedding to a recipe's rounding, and what that does to a gradient:
`vanished.py STUDY ARM`

Rounds the first weights of STUDY's base as ARM's gathers do (a training this short moves an
embedding of deviation 1 by at most the sum of its rates). Prints a Markdown table: the norm of the
gradient of 16 bytes of text, in fp32 on a CPU, which begin with such a byte, lack it, or have it in
second place; and which share of the norm's square the byte's own row of the embedding has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zpp_lab.codecs import kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.models.start import materialize
from zpp_lab.study.report.render import markdown_table

BYTES = 256
TEXT = b" return (size + 1"  # 17 bytes: 16 and what comes after each
COLUMNS = ("Byte", "Its place", "Gradient's norm", "Share of its row")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    config = of_arm(*sys.argv[1:])
    model = rounded(config)
    gone = vanished(model.get_parameter("embed.weight"))
    for byte in gone:
        places = {"first": bytes([byte]) + TEXT[1:], "nowhere": TEXT}
        places["second"] = TEXT[:1] + bytes([byte]) + TEXT[2:]
        rows = [row(model, byte, text, place) for place, text in places.items()]
        print(markdown_table(COLUMNS, rows))
    print(f"\n{len(gone)} of {BYTES} bytes have no embedding left.")
    return 0


def of_arm(study: str, arm: str) -> Config:
    """The config of the study's base with the arm's recipe."""
    found = load_study(study)
    recipe = next(one for one in found.arms if one.name == arm).overrides
    base = [word for word in found.prepare[0].overrides if not word.startswith("recipe=")]
    return compose([*found.overrides, *base, *recipe])


def rounded(config: Config) -> nn.Module:
    """The model's first weights as its ranks get them for forward."""
    model = build_model(config.model, BYTES, "meta")
    plan, start = build_plan(model, config), model.start(config.seed)
    materialize(model, "cpu")
    with torch.no_grad():
        for unit in plan.units:
            names = [segment.name for segment in unit.forward.segments]
            whole = [start.rows(n, 0, model.get_parameter(n).shape[0]) for n in names]
            values = through(unit.forward, config.cluster.world, whole)
            for name, value in zip(names, values, strict=True):
                model.get_parameter(name).copy_(value)
    return model


def through(layout: Layout, world: int, whole: Sequence[Tensor]) -> list[Tensor]:
    """Parameters encoded and decoded, fp32."""
    payload = torch.empty(world, layout.nbytes, dtype=torch.uint8)
    kernels.encode(layout, [value.flatten() for value in whole], None, payload)
    outs = [torch.empty(value.numel()) for value in whole]
    kernels.decode(layout, payload, outs)
    return [out.view(value.shape) for out, value in zip(outs, whole, strict=True)]


def vanished(embedding: Tensor) -> list[int]:
    """The rows of which nothing is left."""
    return (embedding.abs().amax(1) == 0).nonzero().flatten().tolist()


def row(model: nn.Module, byte: int, text: bytes, place: str) -> list[str]:
    """COLUMNS of a text as cells."""
    norm, own = gradient(model, byte, text)
    return [repr(chr(byte)), place, f"{norm:.2e}", f"{(own / norm) ** 2:.3f}"]


def gradient(model: nn.Module, byte: int, text: bytes) -> tuple[float, float]:
    """The norm of a text's gradient, and that of the byte's row in the embedding."""
    model.zero_grad()
    tokens = torch.tensor(list(text))[None]
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    squares = [float(grad.double().square().sum()) for grad in grads.values()]
    return math.sqrt(sum(squares)), float(grads["embed.weight"][byte].double().norm())


if __name__ == "__main__":
    sys.exit(main())
