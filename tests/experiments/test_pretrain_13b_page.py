"""What the pages of experiments/pretrain_13b say stands in their files."""

from __future__ import annotations

import csv
import json
import re
import tarfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from tests.experiments.scripts import loaded
from zpp_lab import compose
from zpp_lab.cost.model import vocabulary
from zpp_lab.engines.build import build_plan
from zpp_lab.memory import estimate
from zpp_lab.models import build_model
from zpp_lab.moments import GIB
from zpp_lab.study.table import markdown_table

HERE = Path(__file__).parents[2] / "experiments" / "pretrain_13b"
FOUR = {
    "zero3": "`zero3` (plain FSDP2)",
    "zero3_reordered": "`zero3_reordered` (only the order of sums differs)",
    "w8": "`w8`",
    "zeropp": "`zeropp`",
}
TWO = {
    "zero3": "`zero3` (plain FSDP2)",
    "zero3_split": "`zero3_split` (only the order of sums differs)",
    "w8": "`w8`",
    "w6": "`w6`",
    "zeropp": "`zeropp`",
    "g8_4_hadamard": "`g8_4_hadamard`",
}
Rows = dict[str, list[dict[str, str]]]  # of each arm, a row a step


@cache
def steps(folder: Path = HERE) -> Rows:
    found: Rows = {}
    with (folder / "results.csv").open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["arm"], []).append(row)
    return found


@cache
def said(folder: Path = HERE) -> str:
    return (folder / "README.md").read_text()


def heldout(folder: Path = HERE) -> dict[str, float]:
    return {arm: float(rows[-1]["heldout_loss"]) for arm, rows in steps(folder).items()}


def numbers(arm: str, what: str, folder: Path = HERE) -> list[float]:
    return [float(row[what]) for row in steps(folder)[arm]]


def seconds(arm: str, folder: Path = HERE) -> float:
    return median(b - a for a, b in pairwise(numbers(arm, "seconds", folder)))


def gigabytes(arm: str, folder: Path = HERE) -> float:
    sent = {
        int(row["bytes_intra"]) + int(row["bytes_inter"]) for row in steps(folder)[arm]
    }  # alike in every step
    assert len(sent) == 1
    return sent.pop() / 1e9


def cell(folder: Path, arm: str, column: str) -> str:
    """Of table.md, which publish.py writes."""
    lines = (folder / "table.md").read_text().splitlines()
    split = [[c.strip() for c in line.strip("|").split("|")] for line in lines if "|" in line]
    return next(row for row in split if row[0] == arm)[split[0].index(column)]


def signed(nats: float) -> str:
    return f"{nats:+.3f}".replace("-", "−")


@cache
def summaries() -> dict[str, dict[str, Any]]:
    found = {}
    with tarfile.open(HERE / "runs.tar.xz") as runs:
        for name in runs.getnames():
            if name.endswith("summary.json"):
                file = runs.extractfile(name)
                assert file is not None
                found[name.split("/")[1]] = json.load(file)
    return found


@pytest.mark.parametrize(("folder", "arms"), [(HERE, FOUR), (HERE / "x2", TWO)], ids=["4", "2"])
def test_the_tables_of_results_are_their_files(folder: Path, arms: dict[str, str]) -> None:
    final = heldout(folder)
    assert set(final) == set(arms)
    for arm, label in arms.items():
        gap = fmean(numbers(arm, "gap", folder)[100:])
        row = [label, f"{final[arm]:.3f}"]
        row += ["–", "–"] if arm == "zero3" else [signed(final[arm] - final["zero3"]), signed(gap)]
        row += [f"{gigabytes(arm, folder):.1f}", f"{seconds(arm, folder):.3f}"]
        row += [f"{16384 / seconds(arm, folder):,.0f}"] if folder == HERE else []
        row += [cell(folder, arm, "Peak GiB a GPU"), cell(folder, arm, "Planned GiB")]
        assert "| " + " | ".join(row) + " |" in said(folder)


@pytest.mark.parametrize("folder", [HERE, HERE / "x2"], ids=["4", "2"])
def test_the_windows_are_what_their_command_prints(folder: Path) -> None:
    script = loaded("experiments/windows.py")
    gaps = script.gaps(folder / "results.csv")
    command = re.search(r"windows\.py experiments/\S+/results\.csv ([\d ]+)`", said(folder))
    assert command
    windows = list(pairwise([0, *map(int, command[1].split()), 150]))
    columns = ["Arm", *(f"steps {first + 1} to {end}" for first, end in windows)]
    rows = [[arm, *(script.spread(each, *w) for w in windows)] for arm, each in gaps.items()]
    assert markdown_table(columns, rows) in said(folder)


def test_both_sets_stand_together() -> None:
    four, two = heldout(), heldout(HERE / "x2")
    controls = {"zero3_reordered": "order control", "zero3_split": "order control"}
    names = {arm: controls.get(arm, f"`{arm}`") for arm in TWO}

    def cells(final: dict[str, float], control: str, arm: str) -> list[str]:
        from_base, from_control = final[arm] - final["zero3"], final[arm] - final[control]
        base = "–" if arm == "zero3" else signed(from_base)
        return [f"{final[arm]:.3f}", base, "–" if arm == control else signed(from_control)]

    for arm, name in names.items():
        here = "zero3_reordered" if arm == "zero3_split" else arm
        first = cells(four, "zero3_reordered", here) if here in four else ["not run", "–", "–"]
        row = " | ".join([name, *first, *cells(two, "zero3_split", arm)])
        assert f"| {row} |" in said()
    plain = [four["zero3"], four["zero3_reordered"], two["zero3"], two["zero3_split"]]
    assert f"Plain runs end between {min(plain):.3f} and {max(plain):.3f}" in said()
    bits = [four["w8"], four["zeropp"]]
    bits += [two[arm] for arm in ("w8", "w6", "zeropp", "g8_4_hadamard")]
    assert len(bits) == 6
    assert min(plain) < min(bits)
    assert max(bits) < max(plain)
    above = four["zeropp"] - four["w8"], two["zeropp"] - two["w6"]
    assert f"the highest in both, by {above[0]:.3f} and {above[1]:.3f}" in said()
    assert max(two[arm] for arm in ("w8", "w6", "g8_4_hadamard")) == two["w6"] < two["zeropp"]


def test_what_is_said_of_the_quiet_part() -> None:
    gaps = {arm: [abs(g) for g in numbers(arm, "gap")] for arm in FOUR}
    assert max(gaps["zero3_reordered"][:29]) < 0.0005 < max(gaps["zero3_reordered"][:31])
    assert max(gaps["zero3_reordered"][:25]) < 0.0001
    assert round(max(gaps["w8"][:29]), 4) == 0.0005
    zeropp = numbers("zeropp", "gap")
    assert f"{fmean(zeropp[:25]):.4f} on average over the first 25 steps" in said()
    assert f"{max(zeropp[:29]):.4f} at most" in said()
    loss = numbers("zero3", "loss")
    assert f"the loss falls from {loss[0]:.2f} to {loss[28]:.2f}" in said()
    fall = (loss[0] - loss[24]) / 24
    assert f"falls by {fall:.2f} a step" in said()
    assert round(fall / fmean(zeropp[:25])) == 25


def test_what_is_said_of_moments_in_8_bits() -> None:
    with tarfile.open(HERE / "resume" / "13b.tar.xz") as runs:
        file = runs.extractfile("resume/whole/metrics.jsonl")
        assert file is not None
        rows = [json.loads(line) for line in file]
    own = steps()["zeropp"]
    assert [row["lr"] for row in rows[:26]] == [float(row["lr"]) for row in own[:26]]
    more = [row["loss"] - float(o["loss"]) for row, o in zip(rows, own, strict=False)]
    assert max(map(abs, more[:9])) < 0.0002 < 0.0003 < more[9]
    assert f"by {more[24]:.3f} at step 25" in said()
    two = numbers("zero3", "loss", HERE / "x2")[24] - numbers("zero3", "loss")[24]
    assert f"their baseline is {two:.3f} above this one there" in said()


def test_what_is_said_of_single_steps() -> None:
    losses, norms = ({arm: numbers(arm, w) for arm in FOUR} for w in ("loss", "grad_norm"))
    at32 = {arm: each[31] for arm, each in losses.items()}
    assert f"the loss is {at32['zero3']:.2f} in `zero3`, {at32['zeropp']:.2f} in `zer" in said()
    assert {f"{at32[arm]:.2f}" for arm in ("w8", "zero3_reordered")} == {"6.99"}
    assert f"a norm of {norms['zeropp'][31]:.0f} for 4 to 6" in said()
    assert sorted(round(norms[a][31]) for a in FOUR if a != "zeropp") == [4, 6, 6]
    two = [numbers(arm, "loss", HERE / "x2")[31] for arm in TWO]
    assert f"({min(two):.2f} to {max(two):.2f})" in said()
    others = [losses[arm][35] for arm in FOUR if arm != "zero3"]
    assert f"loss of {losses['zero3'][35]:.2f}, the others {min(others):.2f}" in said()
    assert f"to {max(others):.2f}, and a norm of {norms['zero3'][35]:.0f} for 4.4" in said()
    after = [-numbers(arm, "gap")[36] for arm in FOUR if arm != "zero3"]
    assert f"it is {min(after):.2f} to {max(after):.2f} above all of them" in said()
    report = (HERE / "report.md").read_text()
    assert "in 4 steps of 3 runs" in report
    for step in (
        "zeropp seed 1 step 49 (60.9 for 3.39)",
        "zero3 seed 1 step 36 (49.2 for 4.44)",
        "w8 seed 1 step 55 (24.2 for 3.02)",
        "zeropp seed 1 step 32 (28.4 for 6)",
    ):
        assert step in report


def test_what_is_said_of_two_gpus() -> None:
    folder = HERE / "x2"
    saved = {arm: 100 * (1 - seconds(arm, folder) / seconds("zero3", folder)) for arm in TWO}
    text = said(folder)
    assert f"{saved['g8_4_hadamard']:.1f} % for `g8_4_hadamard`" in text
    assert f"{saved['w8']:.1f} and {saved['w6']:.1f} % for 8 and 6 bits" in text
    assert f"{saved['zeropp']:.1f} % for `zeropp`" in text
    at32 = {arm: f"{numbers(arm, 'loss', folder)[31]:.2f}" for arm in TWO}
    assert f"between {at32['w6']} (`w6`) and {at32['zero3']} (`zero3` and its control)" in text
    assert max(at32.values()) == at32["zero3"] == at32["zero3_split"]
    gaps = {arm: -(loss - heldout(folder)["zero3"]) for arm, loss in heldout(folder).items()}
    control = gaps.pop("zero3_split")
    others = sorted(gaps[arm] for arm in gaps if arm != "zero3")
    assert f"at the end by {control:.3f} where the others do by {others[0]:.3f} to" in text
    assert f"to {others[-1]:.3f}." in text


def test_what_is_said_of_speed_bytes_and_starts() -> None:
    step = {arm: seconds(arm) for arm in FOUR}
    times = [step["zero3"] / step[arm] for arm in ("w8", "zeropp")]
    assert f"{times[0]:.3f} and {times[1]:.3f} times plain FSDP2's tokens/s" in said()
    for arm, label in (("w8", "a third fewer"), ("zeropp", "63 % fewer")):
        saved = f"{100 * (1 - step[arm] / step['zero3']):.1f} %"
        assert re.search(rf"{label} \(`{arm}`\) (save )?{re.escape(saved)}", said())
    fewer = {arm: 1 - gigabytes(arm) / gigabytes("zero3") for arm in ("w8", "zeropp")}
    assert (round(fewer["w8"], 2), round(fewer["zeropp"], 2)) == (0.33, 0.63)
    cost = step["zero3_reordered"] / step["zero3"] - 1
    assert f"without a codec cost {100 * cost:.1f} %" in said()
    between = {arm: int(steps()[arm][0]["bytes_inter"]) / 1e9 for arm in FOUR}
    assert f"({between['zeropp']:.1f} GB for `zeropp`, {between['zero3']:.1f}" in said()
    first, before = {}, csv.DictReader((HERE / "first_schedule.csv").open())
    for row in before:
        first.setdefault(row["arm"], []).append(float(row["seconds"]))
    less = [1 - step[a] / median(q - p for p, q in pairwise(first[a])) for a in first]
    assert len(less) == 3
    assert f"take {100 * min(less):.0f} to {100 * max(less):.0f} % less" in said()
    whole, start = [], []
    for summary in summaries().values():
        parts = summary["start_up"]
        names = ("launcher", "imports", "ranks meet", "data", "engine", "checkpoint")
        waited = sum(parts[name] for name in names)
        whole.append(waited + summary["seconds"])
        start.append(waited + parts["first step"])
    assert len(whole) == 4
    assert f"takes {min(whole):.0f} to {max(whole):.0f} s from its launcher" in said()
    assert f"on four in the runs above {min(start):.0f} to {max(start):.0f} s" in said()


def test_what_is_said_of_memory() -> None:
    table = {arm: float(cell(HERE, arm, "Planned GiB")) for arm in FOUR}
    peak = {arm: max(s["peak_gib"]) for arm, s in summaries().items()}
    off = [abs(table[arm] / peak[arm] - 1) for arm in FOUR]
    assert f"right** to {100 * max(off):.1f} %" in said()
    study = (HERE / "study.yaml").read_text().split("overrides:\n- model=")[1]
    shared = ["model=" + study.split("\n")[0], *re.findall(r"^- (\S+=\S+)$", study, re.M)]
    host = ["engine.gather=flat", "engine.transport=peer"]
    planned = []
    for arm in FOUR:
        config = compose.compose([*shared, *host, f"recipe={arm}"])
        vocab = max(32_000, vocabulary(config))
        plan = build_plan(build_model(config.model, vocab, "meta"), config)
        planned.append(estimate(plan, config, vocab).tensors / GIB)
    text = ", ".join(f"{gib:.2f}" for gib in planned[:3]) + f" and {planned[3]:.2f} GiB"
    assert text in said()
    less = [peak[arm] - gib for arm, gib in zip(FOUR, planned, strict=True)]
    assert f"{min(less):.2f} to {max(less):.2f} less than measured" in said()
    assert max(n / peak[arm] for arm, n in zip(FOUR, less, strict=True)) < 0.002
    held = [s["peak_memory_bytes"] / GIB - max(s["peak_gib"]) for s in summaries().values()]
    assert f"reserved beyond that is {min(held):.0f} to {max(held):.0f} GiB" in said()
