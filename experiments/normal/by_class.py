"""What `zpp-lab tune` chooses by the slopes of ../reference/tuned.md with normal levels on offer.

    python experiments/normal/by_class.py [BITS]

A class's slope is what an error costs there, in nats for a unit of NMSE; errors are those of normal
numbers, bytes those of four ranks. Prints each class's choice, and what the law expects of the
recipe's gap, and of the best one for all classes alike, over `w4_256_symmetric`'s.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch

from zpp_lab.codecs import build_codec
from zpp_lab.config.codec import BITS, NORMAL_BITS, CodecConfig
from zpp_lab.tools.plan.law import load_law, nmse
from zpp_lab.tools.tune import CHOSEN, LEVELS, POWER, Choice, spend

TUNED = Path(__file__).parents[1] / "reference" / "tuned.md"
RANKS, LAYERS, BLOCKS = 4, 6, (64, 128, 256, 2048)
EVEN = "4 bits, blocks of 256"


def main() -> int:
    bits = float(sys.argv[1]) if len(sys.argv) > 1 else 4.125
    lines = [line.split("|") for line in TUNED.read_text().splitlines() if line.startswith("| `")]
    classes = [(row[1].strip(" `"), int(row[2].replace(",", "")), float(row[5])) for row in lines]
    offered = [
        CodecConfig(**dict(zip(CHOSEN, (name, b, block, symmetric, scale), strict=True)))
        for b, block, (name, symmetric), scale in product(BITS, BLOCKS, LEVELS, ("fp32", "bf16"))
        if name == "block" or b in NORMAL_BITS
    ]
    built = [(codec, build_codec(codec, torch.float32)) for codec in offered]
    errors = [nmse(codec, False) for _, codec in built]
    choices = []
    for name, numel, slope in classes:
        parts = RANKS * (LAYERS if "*" in name else 1)
        found = zip(built, errors, strict=True)
        choices.append(
            [Choice(c, parts * own.nbytes(numel // parts), e, slope * e) for (c, own), e in found]
        )
    budget = int(bits * sum(numel for _, numel, _ in classes) / 8)
    chosen = spend(choices, budget)
    if chosen is None:
        raise ValueError(f"{bits:g} bits a weight are too few: use 2.5 or more")
    for (name, _, slope), choice in zip(classes, chosen, strict=True):
        print(f"{name:30} {slope:.3f}  {choice.text}")
    alike = {own[0].text: own for own in zip(*choices, strict=True)}
    fit = {text: own for text, own in alike.items() if sum(c.nbytes for c in own) <= budget}
    best = min(fit, key=lambda text: sum(c.cost for c in fit[text]))
    power = load_law().values[POWER]
    for text, own in (("by class", chosen), (best, fit[best])):
        share = sum(c.cost for c in own) / sum(c.cost for c in alike[EVEN])
        print(f"{text}: {share**power:.2f} of the gap of {EVEN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
