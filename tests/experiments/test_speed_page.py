"""What experiments/speed/README.md says of NVLink, of one and two blocks a unit, and of calls/8:
the host's parts as a calibration on GPUs found them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.cost.machine import Machine, load_machine
from zpp_lab.cost.step import StepTime, predict

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


def calibrated(call: int) -> Machine:
    return load_machine(str(HERE / "calls" / str(call) / "machine.json"))


@cache
def errors(which: str) -> list[tuple[dict[str, str], float]]:
    """Rows of results.csv and their errors in percent, by a machine of `MACHINES`."""
    check_cost, found = loaded("experiments/speed/check_cost.py"), []
    for row in rows("results.csv"):
        if row["engine"] in ("fsdp", "fsdp2"):
            found.append((row, 100 * check_cost.checked(row, MACHINES[which], []).error))
    return found


NEW, OLD = calibrated(8), calibrated(5)
MACHINES = {"h200": load_machine("h200"), "calls/5": OLD, "calls/8": NEW}
MACHINES["without"] = replace(NEW, host=NEW.host.as_before(8))  # as --host-as-before 8
LOST = NEW.intra.gpu_share, OLD.intra.gpu_share  # of a transfer's time
MACHINES["12"] = replace(NEW, intra=replace(NEW.intra, gpu_share=LOST[1]))


def some(which: str, **values: str) -> dict[str, float]:
    """Errors by arm of the rows that have these values."""
    return {
        row["arm"]: error
        for row, error in errors(which)
        if all(row[name] == value for name, value in values.items())
    }


def test_what_the_calibration_with_the_hosts_parts_predicts() -> None:
    assert "5150ffe" in NEW.comment["made by"]
    assert "2 × NVIDIA H200" in NEW.comment["made by"]
    assert NEW.inter.efficiency == 1
    sizes = [abs(error) for _, error in errors("calls/8")]
    assert len(sizes) == 33
    assert f"four GPUs: median error {median(sizes):.1f} %" in PAGE
    named = [
        (row, error)
        for row, error in errors("calls/8")
        if row["nodes"] == "2" and row["link_gbps"] != "max"
    ]
    wrong = {(row["arm"], row["link_gbps"]): e for row, e in named if abs(e) >= 3.6}
    assert set(wrong) == {("w4", "50"), ("zeropp", "50"), ("w4_g84h", "50")}
    assert f"{len(named) - 3} of the {len(named)} with a named speed within 3.6 %" in PAGE
    (w4, zeropp, w4_g84h) = (wrong[arm, "50"] for arm in ("w4", "zeropp", "w4_g84h"))
    others = f"{w4:+.0f} % (w4), {zeropp:+.0f} and {w4_g84h:+.0f} % (zeropp and w4_g84h"
    assert f"the others {others}, all at 50 Gb/s)" in PAGE


def test_where_neither_links_nor_kernels_bound_the_step_it_predicts_better() -> None:
    inside = {m: some(m, nodes="1", model="1_3b").values() for m in ("calls/5", "calls/8")}
    least, most = min(inside["calls/8"]), max(inside["calls/8"])
    was = f"{min(inside['calls/5']):.0f} to {max(inside['calls/5']):.0f}"
    assert f"1 × 4 is predicted {least:.0f} to {most:.0f} % too fast in place of {was}" in PAGE
    free = {m: some(m, nodes="2", link_gbps="max") for m in ("calls/5", "calls/8")}
    now, before = free["calls/8"], free["calls/5"]
    both = [f"{found['zeropp']:.0f} and {found['w4_g84h']:.0f}" for found in (now, before)]
    assert f"without a limit {both[0]} % in place of {both[1]}" in PAGE
    assert f"as wrong as it was ({now['fsdp2']:+.0f} %)" in PAGE


def test_what_it_says_of_large_models() -> None:
    def between(which: str) -> str:
        found = [error for row, error in errors(which) if row["model"] in ("13b", "32_5b")]
        return f"{min(found):.0f} to {max(found):.0f} %"

    assert f"13B and 32.5B are {between('calls/8')} too fast" in PAGE
    lost = f"loses {100 * LOST[0]:.0f} % of a transfer's time beside it"
    assert f"{lost}, by that of calls/5 {100 * LOST[1]:.0f} %" in PAGE
    assert f"they are {between('12')} too fast" in PAGE


def plain_on_nvlink() -> dict[str, str]:
    (row,) = (r for r in rows("results.csv") if (r["arm"], r["nodes"]) == ("fsdp2", "1"))
    return row


def host_of(machine: Machine) -> StepTime:
    """Plain FSDP2's step on 1 x 4 by this machine: the host is its bound."""
    config = loaded("experiments/speed/check_cost.py").config_of(plain_on_nvlink(), [])
    found = predict(config, machine, own_loop=False)
    assert found.step_s == pytest.approx(found.host_s)
    return found


KINDS = (("forward", "backward"), ("gathers",), ("reductions",), ("once a step",))


def parts(machine: Machine) -> list[float]:
    """Milliseconds of blocks, gathers, reductions, once a step, and all of them."""
    found = host_of(machine)
    each = [sum(found.parts.get(f"host, {k}", 0.0) for k in kinds) for kinds in KINDS]
    assert sum(each) == pytest.approx(found.host_s)
    return [1000 * seconds for seconds in (*each, found.host_s)]


def measured_in(call: int) -> str:
    found = json.loads((HERE / "calls" / str(call) / "1x4.json").read_text())
    step = median({c["arm"]: c["seconds"] for c in found["cells"]}["fsdp2"])
    return f"{1000 * step:.1f}"


@pytest.mark.parametrize(
    ("name", "machine", "measured"),
    [
        ("calls/1", calibrated(1), measured_in(1)),
        ("calls/5", OLD, measured_in(5)),
        ("calls/8 without the two", MACHINES["without"], "no bench"),
        ("calls/8", NEW, "no bench"),
    ],
)
def test_the_rows_of_the_hosts_parts(name: str, machine: Machine, measured: str) -> None:
    assert bool(machine.host.lacks) == (machine is not NEW)
    told = " | ".join(f"{ms:.1f}" for ms in parts(machine))
    assert f"| {name} | {told} | {measured} |" in PAGE


def test_what_is_said_beside_the_hosts_parts() -> None:
    host = NEW.host
    again, forward = (1000 * s for s in (host.again_s("eager"), host.block_forward_s["eager"]))
    assert f"again takes {again:.3f} ms where a forward takes {forward:.3f}" in PAGE
    rest = 1000 * (host.block_rest_s or 0)
    assert f"once a step is {rest:.3f}" in PAGE
    new, without, old = parts(NEW), parts(MACHINES["without"]), parts(OLD)
    both = new[4] - without[4]
    each = new[0] - without[0], new[3] - without[3]
    assert f"**The two are {both:.1f} ms** ({each[0]:.1f} and {each[1]:.1f})" in PAGE
    cpu = json.loads((HERE.parent / "parity" / "host_parts.json").read_text())["parts_ms"]
    passes = sum(ms["eager"] for ms in (OLD.host.block_forward_s, OLD.host.block_backward_s))
    longer = 1000 * passes / (cpu["forward"] + cpu["backward"])
    guess = longer * (24 * (cpu["again"] - cpu["forward"]) + (24 - 8) * cpu["rest"])
    assert f"taken {longer:.2f} times as the host of calls/5" in PAGE
    assert f"made {guess:.0f}." in PAGE
    took = 1000 * float(plain_on_nvlink()["step_s"])
    assert f"To the {took:.1f} ms" in PAGE
    assert f"they are {100 * both / (took - without[4]):.0f} % of what is missing" in PAGE
    wires, were = new[1] + new[2], old[1] + old[2]
    less = (old[4] - were) - (without[4] - wires)
    assert f"took {wires:.1f} ms in place of {were:.1f}, all else {less:.1f} less" in PAGE
    one = f"({parts(calibrated(1))[4]:.0f}, {old[4]:.0f} and {without[4]:.0f} ms for one step"
    assert one in PAGE
    assert f"than what is left ({took - new[4]:.0f} ms)" in PAGE
    bare = 1000 * seconds(ONE, "compute")
    model = f"`compute` took {bare:.1f} ms, for which these figures have {new[0] + new[3]:.1f}"
    assert model in PAGE
    assert f"FSDP2 {took - bare:.1f} more, for which they have {wires:.1f} at least" in PAGE


def test_the_mean_error_of_rows_bound_by_the_host() -> None:
    host_bound = loaded("experiments/speed/check_cost.py").host_bound
    mean = {}
    for which in ("h200", "calls/5", "without", "calls/8"):
        found = [error for row, error in errors(which) if host_bound(row)]
        assert len(found) == 8
        mean[which] = sum(found) / 8
    told = f"{mean['h200']:.0f} % too fast on average by h200.json, {mean['calls/5']:.0f} % by"
    assert f"{told} calls/5/machine.json, {mean['calls/8']:.0f} % by calls/8/" in PAGE
    assert f"falls from {mean['without']:+.1f} to {mean['calls/8']:+.1f} %" in PAGE
    assert f"from {mean['calls/5']:.0f} to {mean['without']:.0f} % without the two" in PAGE
    guide = (ROOT / "GUIDE.md").read_text()
    assert f"{mean['calls/8']:.0f} % too fast on average, {mean['without']:.0f} without" in guide
    both, step = parts(NEW)[4] - parts(MACHINES["without"])[4], parts(NEW)[4]
    assert f"they were {both:.0f} ms of a step of {step:.0f} by these figures" in guide


def rows(*names: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for name in names:
        with (HERE / name).open() as lines:
            found += csv.DictReader(lines)
    return found
