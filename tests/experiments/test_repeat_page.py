"""What experiments/repeat/README.md says stands in its file."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parents[2] / "experiments" / "repeat"


def test_the_table_is_the_file() -> None:
    found = json.loads((HERE / "repeat.json").read_text())
    text = (HERE / "README.md").read_text()
    assert f"commit {found['commit'][:7]}" in text
    assert len(found["machine"]["gpus"]) == 2
    for case, filled in (
        ("zero3/host/1", "1 GiB beyond a step's tensors"),
        ("zero3/host", "not filled"),
    ):
        one = found["results"][case]
        differ = f"{len(one['differing'])} of {one['steps']}"
        row = f"`{case}` | {filled} | {one['retries']} | {differ}"
        assert f"| {row} | {one['loss']:.6f} | {one['norm']:.6f} |" in text
    assert set(found["results"]) == {"zero3/host/1", "zero3/host"}
    results = found["results"].values()
    assert len({(one["loss"], one["norm"]) for one in results}) == 1  # every digit, both cases
    assert f"as far as {sum(one['steps'] for one in results)} steps can say" in text
    full = found["results"]["zero3/host/1"]
    assert round(full["retries"] / full["steps"]) == 8  # "eight times a step"
