"""Train a study's arms, export each quantized, and measure all on the same held-out tokens.

    python experiments/qexport/run.py experiments/qexport/study.yaml OUT [--seeds 1,2]

Each arm's folder holds its weights as the wire brings them. Beside it stands the baseline of the
same seed, rounded to nearest with the same codec after training. transformers measures both.
OUT/results.csv has a row for each seed and model; table.py makes a table of it.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.compose import load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.tools.evaluate import Row, evaluate
from zpp_lab.tools.export import export_quantized
from zpp_lab.tools.export.model import open_run
from zpp_lab.tools.export.packed import compressed_tensors
from zpp_lab.tools.export.wire import codec_text

COLUMNS = ["seed", "model", "of", "codec", "measured_by", "heldout_loss", "perplexity", "bytes"]
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", help="in place of the study's")
    parser.add_argument(
        "--no-folders", action="store_true", help="measure by zpp_lab alone, without transformers"
    )
    args = parser.parse_args()
    if not args.no_folders:
        import transformers  # noqa: F401  # what is missing is said before anything is trained

        compressed_tensors()
    study = load_study(str(args.study), {}, [])
    seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else study.seeds
    records: list[Record] = []
    for seed in seeds:
        records += one_seed(args.study, study, seed, args.out, not args.no_folders)
        _write(args.out / "results.csv", records)


def one_seed(file: Path, study: StudyConfig, seed: int, out: Path, folders: bool) -> list[Record]:
    """Every model of one seed; a seed that was measured before is read from its own file."""
    part = out / f"seed{seed}.csv"
    if part.is_file():
        with part.open() as lines:
            return list(csv.DictReader(lines))
    runs = out / f"runs-seed{seed}"
    words = ["study", str(file), "--dir", str(runs), "--seeds", str(seed), "--jobs", "1"]
    subprocess.run([sys.executable, "-m", "zpp_lab.cli", *words], check=False)
    where = finished(study, {arm.name: runs / arm.name / f"seed{seed}" for arm in study.arms})
    found = list(measured(study, seed, where, out / "exports" if folders else None))
    _write(part, found)
    for folder in where.values():
        shutil.rmtree(folder / "checkpoints")
    return found


def finished(study: StudyConfig, where: dict[str, Path]) -> dict[str, Path]:
    """The runs that ended well; those that diverged are named and left out."""
    ended = {name: run for name, run in where.items() if (run / "summary.json").is_file()}
    open_still = [n for n in where if n not in ended and not (where[n] / "failure.json").is_file()]
    if open_still or study.baseline not in ended:
        sys.exit(f"not finished: {', '.join(open_still) or study.baseline}; run this again")
    for name in sorted(set(where) - set(ended)):
        print(f"{name} failed and is left out: see {where[name]}/failure.json", file=sys.stderr)
    return ended


def measured(
    study: StudyConfig, seed: int, where: dict[str, Path], exports: Path | None
) -> Iterator[Record]:
    """The baseline unquantized; then of each arm its masters, its wire and its folder, and the
    baseline rounded with the arm's codec, by us and as a folder."""
    base = where[study.baseline]
    arms = {name: run for name, run in where.items() if name != study.baseline}
    codecs = {name: wire_codec(run) for name, run in arms.items()}
    yield _record(seed, study.baseline, study.baseline, "", *evaluate([base]))
    for name, run in arms.items():
        codec, text = codecs[name], codec_text(codecs[name])
        master, wire = evaluate([run], data=base)
        yield _record(seed, f"{name} masters", name, "", master)
        yield _record(seed, name, name, text, wire)
        if exports:
            yield _folder(seed, name, name, text, run, None, base, exports)
        rounded = evaluate([base], codecs=[codec])[-1]
        title = f"{study.baseline} rounded as {name}"
        yield _record(seed, title, study.baseline, text, rounded)
        if exports:
            yield _folder(seed, title, study.baseline, text, base, codec, base, exports)


def wire_codec(run: Path) -> CodecConfig:
    config, _ = open_run(run)
    return Recipe(config.recipe, config.cluster).wire("weights_forward")


def _folder(
    seed: int,
    model: str,
    of: str,
    text: str,
    run: Path,
    codec: CodecConfig | None,
    data: Path,
    exports: Path,
) -> Record:
    shutil.rmtree(exports, ignore_errors=True)
    made = export_quantized(run, exports, codec=codec)
    (row,) = evaluate([exports], data=data)
    shutil.rmtree(exports)
    return _record(seed, model, of, text, row, made.nbytes)


def _record(seed: int, model: str, of: str, codec: str, row: Row, nbytes: int | str = "") -> Record:
    by = "transformers" if row.weights == "transformers" else "zpp_lab"
    values = (seed, model, of, codec, by, row.heldout_loss, row.perplexity, nbytes)
    return dict(zip(COLUMNS, values, strict=True))


def _write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


if __name__ == "__main__":
    main()
