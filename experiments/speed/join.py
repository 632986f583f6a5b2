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
from typing import Any

from zpp_lab.tools.bench.step.arms import COMPUTE
from zpp_lab.tools.bench.step.results import put_rows, read_rows

Rows = list[dict[str, str]]


def rows_of(details: Path, arms: list[str], rows: Rows) -> Rows:
    """Those that NODESxGPUS[-TAG].json is about, of these arms where any are named, and of a file
    with a tag its own arms alone: the step without communication stands in the table once.
    ValueError for an arm that the file lacks."""
    shape, _, tag = details.stem.partition("-")
    found = json.loads(details.read_text())
    layouts = {arm: _layout_of(config) for arm, config in found["config"].items()}
    if lacking := [arm for arm in arms if arm not in layouts]:
        raise ValueError(f"no {', '.join(lacking)} in {details}; it has {', '.join(layouts)}")
    own = {
        (c["arm"], c["link_gbps"], *layouts[c["arm"]])
        for c in found["cells"]
        if not arms or c["arm"] in arms
    }
    where = (*shape.split("x"), str(found["gpus"]["ranks_per_gpu"]))
    return [
        row
        for row in rows
        if (row["nodes"], row["gpus_per_node"], row["ranks_per_gpu"]) == where
        and tuple(row[key] for key in ("arm", "link_gbps", "model", "tp", "pp")) in own
        and not (row["arm"] == COMPUTE and tag not in ("", "shared"))
    ]


def _layout_of(config: dict[str, Any]) -> tuple[str, str, str]:
    """Return the model's preset, tensor parts and stages, as a row has them."""
    cluster = config["cluster"]
    return config["model"]["preset"], *(str(cluster.get(axis, 1)) for axis in ("tp", "pp"))


def taken(word: str) -> tuple[Rows, list[Path]]:
    """Rows and JSON files of `OUT[=NAME[:ARM+...],...]`. ValueError for what is not there."""
    place, _, names = word.partition("=")
    out, chosen = Path(place), {}
    for name in names.split(",") if names else ():
        file, _, arms = name.partition(":")
        chosen[out / f"{file}.json"] = arms.split("+") if arms else []
    if without := [str(f) for f in (out / "results.csv", *chosen) if not f.is_file()]:
        raise ValueError(f"no {', no '.join(without)}")
    rows = read_rows(out / "results.csv")
    if not chosen:
        return rows, sorted(out.glob("*x*.json"))
    return [row for file, arms in chosen.items() for row in rows_of(file, arms, rows)], [*chosen]


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, *words = sys.argv[1:]
    try:
        parts = {word: taken(word) for word in words}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    Path(folder).mkdir(parents=True, exist_ok=True)
    for word, (rows, files) in parts.items():
        put_rows(Path(folder), rows)
        for file in files:
            shutil.copy(file, Path(folder) / file.name)
        print(f"{word}: {len(rows)} rows")
    table = Path(folder) / "results.csv"
    print(f"{table}: {len(read_rows(table))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
