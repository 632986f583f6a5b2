"""The tables of several calls of run.sh as one: `join.py FOLDER OUT...`

FOLDER gets the rows of each OUT's results.csv, of two of one cell the later's, and its JSON files.
`zpp-lab report FOLDER` makes the page.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from zpp_lab.bench.step_results import put_rows, read_rows


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, *outs = map(Path, sys.argv[1:])
    without = [str(out) for out in outs if not (out / "results.csv").is_file()]
    if without:
        print(f"no results.csv in {', '.join(without)}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for out in outs:
        rows = read_rows(out / "results.csv")
        put_rows(folder, rows)
        for details in sorted(out.glob("*x*.json")):
            shutil.copy(details, folder / details.name)
        print(f"{out}: {len(rows)} rows")
    print(f"{folder / 'results.csv'}: {len(read_rows(folder / 'results.csv'))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
