"""What experiments/speed/README.md says of NVLink, and of one and two blocks a unit."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.cost.machine import load_machine

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "speed"
PAGE = (HERE / "README.md").read_text()

Cells = dict[str, dict[str, Any]]


def details(blocks: int) -> dict[str, Any]:
    path = HERE / "calls" / "7" / f"blocks-{blocks}" / "1x4.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def cells(blocks: int) -> Cells:
    return {cell["arm"]: cell for cell in details(blocks)["cells"]}


def rounds(cell: dict[str, Any]) -> list[float]:
    return [median(cell["seconds"][:4]), median(cell["seconds"][4:])]


ONE, TWO = cells(1), cells(2)


def seconds(found: Cells, arm: str) -> float:
    return float(median(found[arm]["seconds"]))


def test_the_table_is_what_its_command_makes(tmp_path: Path) -> None:
    (line,) = (text for text in PAGE.splitlines() if "speed/join.py experiments/speed " in text)
    _, script, _, *calls = line.split()
    words = [str(ROOT / script), str(tmp_path), *(str(ROOT / call) for call in calls)]
    subprocess.run([sys.executable, *words], env={"PYTHONPATH": str(ROOT)}, check=True)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"results.csv", "1x4.json", "2x2.json"} <= made
    for name in made:
        assert (tmp_path / name).read_text() == (HERE / name).read_text(), name


def test_the_benches_of_one_and_two_blocks_differ_in_that_alone() -> None:
    one, two = details(1), details(2)
    for arm, config in one["config"].items():
        assert config["engine"].pop("blocks_per_unit") == 1
        assert two["config"][arm]["engine"].pop("blocks_per_unit") == 2
    assert one["config"] == two["config"]
    assert one["commit"] == two["commit"]
    assert one["commit"].startswith("2a24431")
    assert one["machine"] == two["machine"]


@pytest.mark.parametrize("arm", ONE)
def test_the_rows_of_one_and_two_blocks_are_their_files(arm: str) -> None:
    words = [f"`{arm}`"]
    for found in (ONE, TWO):
        times, step = found[arm]["seconds"], seconds(found, arm)
        assert len(times) == 8
        words += [f"{step:.4f} ({min(times):.4f} to {max(times):.4f})"]
        words += [f"{1000 * median(found[arm]['waiting']):.1f}"]
        words += [f"{step / seconds(found, 'compute'):.2f}"]
    words += [f"{seconds(ONE, arm) / seconds(TWO, arm):.2f}"]
    assert f"| {' | '.join(words)} |" in PAGE


def test_what_is_said_beside_that_table() -> None:
    fast, slow = rounds(TWO["compute"]), rounds(ONE["compute"])
    each = f"{fast[0]:.3f}, {fast[1]:.3f} and then {slow[0]:.3f}, {slow[1]:.3f}"
    assert f"in the order of time {each})" in PAGE
    known = rows(*(f"calls/{n}/results.csv" for n in (1, 4, 5)))
    before = [float(r["step_s"]) for r in known if (r["arm"], r["nodes"]) == ("compute", "1")]
    assert f"in any call before ({min(before):.3f} to {max(before):.3f} s;" in PAGE
    assert max(max(found["compute"]["waiting"]) for found in (ONE, TWO)) < 0.001
    drift = max(b / a for found in (ONE, TWO) for a, b in map(rounds, found.values()))
    assert f"up to {100 * (drift - 1):.0f} % slower" in PAGE
    first, second = rounds(ONE["zeropp"])
    assert f"zeropp with one block {first:.3f} and {second:.3f} s" in PAGE
    over = {
        arm: [seconds(found, arm) / seconds(found, "compute") for found in (ONE, TWO)]
        for arm in ONE
    }
    shorter = 100 * (1 - over["fsdp2"][1] / over["fsdp2"][0])
    longer = 100 * (over["zeropp"][1] / over["zeropp"][0] - 1)
    assert f"FSDP2's step {shorter:.0f} % shorter, zeropp's {longer:.0f} % longer" in PAGE


def ratios(found: Cells) -> list[str]:
    """zeropp over FSDP2: the medians, then by rounds."""
    whole = seconds(found, "fsdp2") / seconds(found, "zeropp")
    each = zip(rounds(found["fsdp2"]), rounds(found["zeropp"]), strict=True)
    return [f"{value:.2f}" for value in (whole, *(a / b for a, b in each))]


def test_zeropp_over_fsdp2_on_nvlink() -> None:
    one, two = ratios(ONE), ratios(TWO)
    assert f"{one[0]} with one block ({one[1]} and {one[2]} by rounds)" in PAGE
    assert f"{two[0]} with two ({two[1]} and {two[2]})" in PAGE
    assert f"| {one[0]}, 1.0: **missed**; {one[1]} and {one[2]} in its two rounds |" in PAGE
    calls = {n: json.loads((HERE / "calls" / n / "1x4.json").read_text()) for n in "145"}
    was = {n: ratios({c["arm"]: c for c in found["cells"]})[0] for n, found in calls.items()}
    for number, ratio in was.items():
        assert f"{ratio} ([calls/{number}](calls/{number})" in PAGE
    first = (ROOT / "experiments" / "README.md").read_text()
    least, most = min(was.values()), max(was.values())
    assert f"({least} to {most} in earlier calls, {two[0]} with two blocks a unit" in first


def test_what_the_host_alone_says_of_both() -> None:
    path = HERE.parent / "parity" / "host_steps.json"
    ms = {name: each["median"] for name, each in json.loads(path.read_text())["ms"].items()}

    def both(arm: str, words: str) -> str:
        one, two = ms[f"{arm}, 1"], ms[f"{arm}, 2"]
        return words.format(one, two) + f" ({100 * (1 - two / one):.0f} % less)"

    assert f"`compute` {ms['compute']:.1f} ms a step" in PAGE
    assert both("fsdp2", "plain FSDP2 {:.1f} with one block and {:.1f} with two") in PAGE
    assert both("zeropp", "zeropp {:.1f} and {:.1f}") in PAGE
    behind = [1000 * (seconds(c, "zeropp") - seconds(c, "fsdp2")) for c in (ONE, TWO)]
    assert "zeropp {:.0f} and {:.0f} ms behind".format(*behind) in PAGE


def test_what_the_cost_model_says_of_both() -> None:
    check_cost = loaded("experiments/speed/check_cost.py")
    machine = load_machine("h200")
    said: dict[tuple[str, int], tuple[int, int]] = {}
    for blocks in (1, 2):
        for row in rows(f"calls/7/blocks-{blocks}/results.csv"):
            if row["arm"] in ("fsdp2", "zeropp"):
                found = check_cost.checked(row, machine, [])
                step = 1000 * int(row["tokens_per_step"]) / found.predicted
                said[row["arm"], blocks] = round(step), round(100 * found.error)
    (a, i), (b, j) = said["zeropp", 1], said["zeropp", 2]
    (c, k), (d, m) = said["fsdp2", 1], said["fsdp2", 2]
    assert f"{a} ms for zeropp with one block and {b} with two" in PAGE
    assert f"plain FSDP2 {c} and {d}" in PAGE
    assert f"by {i} and {j} % for zeropp, {k} and {m} % for FSDP2" in PAGE


def rows(*names: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for name in names:
        with (HERE / name).open() as lines:
            found += csv.DictReader(lines)
    return found
