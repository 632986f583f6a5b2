"""The tables of several calls of run.sh as one: `join.py FOLDER OUT[=NAME[:ARM+...],...]...`

FOLDER gets the rows of each OUT's results.csv, of two of one cell the later's, and its JSON files.
With names of those files (`OUT=1x4,2x2-studies`) their rows alone, and with arms
(`OUT=2x2-blocks:zeropp_4`) those of these. `zpp-lab report FOLDER` makes the page.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from zpp_lab.tools.bench.step.arms import COMPUTE
from zpp_lab.tools.bench.step.results import put_rows, read_rows

Rows = list[dict[str, str]]


def rows_of(details: Path, arms: list[str], rows: Rows) -> Rows:
    """Those that NODESxGPUS[-TAG].json is about, of these arms where any are named, and of a file
    with a tag its own arms alone: the step without communication stands in the table once.
    ValueError for an arm that the file lacks."""
    shape, _, tag = details.stem.partition("-")
    found = json.loads(details.read_text())
    models = {arm: config["model"]["preset"] for arm, config in found["config"].items()}
    if lacking := {*arms} - {*models}:
        raise ValueError(f"{details} has no arm {', '.join(lacking)}; it has {', '.join(models)}")
    own = {
        (c["arm"], c["link_gbps"], models[c["arm"]])
        for c in found["cells"]
        if not arms or c["arm"] in arms
    }
    where = (*shape.split("x"), str(found["gpus"]["ranks_per_gpu"]))
    return [
        row
        for row in rows
        if (row["nodes"], row["gpus_per_node"], row["ranks_per_gpu"]) == where
        and (row["arm"], row["link_gbps"], row["model"]) in own
        and not (row["arm"] == COMPUTE and tag not in ("", "shared"))
    ]


def put(folder: Path, out: Path, asked: dict[str, list[str]]) -> int:
    """asked: the arms of each file's name; all of `out` without."""
    rows, files = read_rows(out / "results.csv"), sorted(out.glob("*x*.json"))
    if asked:
        files = [out / f"{name}.json" for name in asked]
        rows = [
            row
            for file, arms in zip(files, asked.values(), strict=True)
            for row in rows_of(file, arms, rows)
        ]
    put_rows(folder, rows)
    for file in files:
        shutil.copy(file, folder / file.name)
    return len(rows)


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, *words = sys.argv[1:]
    asked = [(Path(out), _named(names)) for out, _, names in _cut(words)]
    without = [out / "results.csv" for out, _ in asked]
    without += [out / f"{name}.json" for out, names in asked for name in names]
    without = [file for file in without if not file.is_file()]
    if without:
        print(f"no {', no '.join(map(str, without))}", file=sys.stderr)
        return 1
    Path(folder).mkdir(parents=True, exist_ok=True)
    for out, names in asked:
        print(f"{out}: {put(Path(folder), out, names)} rows")
    table = Path(folder) / "results.csv"
    print(f"{table}: {len(read_rows(table))} rows")
    return 0


def _named(names: str) -> dict[str, list[str]]:
    cut = (name.partition(":") for name in names.split(",") if name)
    return {name: arms.split("+") if arms else [] for name, _, arms in cut}


def _cut(words: list[str]) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in words]


if __name__ == "__main__":
    sys.exit(main())
