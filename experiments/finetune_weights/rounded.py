"""The baseline's weights rounded to nearest with every arm's codec after training, run by run.

    python experiments/finetune_weights/rounded.py STUDY_FOLDER OUT.csv [--seeds 1,2]

Beside an arm's held-out loss this tells whether training with a codec leaves a better quantized
model than rounding does. The baseline's runs need their checkpoints. OUT.csv has a row for each
arm and seed: its codec, its own held-out loss and that of the baseline rounded so, nats a token.
Arms that exempt other parameters than the baseline, or have rules, are left out: their codec alone
is not their recipe. Stochastic rounding is none after training, so its arms stand beside the
baseline rounded to nearest.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.schema import Config
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export.model import run_config
from zpp_lab.tools.export.wire import codec_text

BASE = "zero3"
COLUMNS = ["arm", "seed", "codec", "heldout_loss", "rounded_loss", "baseline_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_args()
    rows = [row for seed in args.seeds.split(",") for row in one_seed(args.study, int(seed))]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def one_seed(study: Path, seed: int) -> list[dict[str, str | int | float]]:
    base = study / BASE / f"seed{seed}"
    arms = {run.parent.name: run for run in sorted(study.glob(f"*/seed{seed}"))}
    plain = run_config(base)
    codecs = {name: codec for name, run in arms.items() if (codec := codec_of(run, plain))}
    distinct = list(dict.fromkeys(codecs.values()))
    whole, *rounded = evaluate([base], codecs=distinct)
    losses = dict(zip(distinct, (row.heldout_loss for row in rounded), strict=True))
    found: list[dict[str, str | int | float]] = []
    for name, codec in codecs.items():
        own = heldout_loss(arms[name])
        if own is None:
            print(f"{arms[name]} has not finished and is left out", file=sys.stderr)
            continue
        values = (name, seed, codec_text(codec), own, losses[codec], whole.heldout_loss)
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def codec_of(run: Path, plain: Config) -> CodecConfig | None:
    """An arm's codec on weights, to nearest; None without one, or where other parameters than the
    baseline's are exempt."""
    config = run_config(run)
    codec = Recipe(config.recipe, config.cluster).wire("weights_forward")
    alike = config.recipe.exempt == plain.recipe.exempt and not config.recipe.rules
    return replace(codec, rounding="nearest") if codec.bits is not None and alike else None


def heldout_loss(run: Path) -> float | None:
    summary = run / "summary.json"
    return json.loads(summary.read_text())["heldout_loss"] if summary.is_file() else None


if __name__ == "__main__":
    main()
