"""The pages' links lead somewhere, and what README.md and experiments/README.md say of results
follows from them."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "GUIDE.md", "ARCHITECTURE.md")),
    *sorted(ROOT.glob("experiments/**/[A-Z]*.md")),
]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(there), f"{link}: no such heading"


def test_every_study_of_conf_is_named() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "conf" / "study").glob("*.yaml"):
        name = re.sub(r"(_x\d)?(_mini)?$", "", path.stem)
        assert f"`{name}`" in text, name


def test_every_page_of_results_is_listed() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\(\1\) \|", text, re.M)
    assert sorted(listed) == sorted(p.parent.name for p in ROOT.glob("experiments/*/README.md"))


def test_figures_of_the_first_screen_stand_among_the_results() -> None:
    """Those are checked against their files, here and in tests/experiments."""
    first = (ROOT / "README.md").read_text().split("**Begin**")[0]
    text = (ROOT / "experiments" / "README.md").read_text()
    figures = re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", first)
    assert len(figures) > 12
    assert [f for f in figures if f not in text] == []


def test_what_the_results_say_of_bits_follows_from_its_results() -> None:
    rows = list(csv.DictReader((ROOT / "experiments" / "bits" / "results.csv").open()))
    gaps: dict[str, list[float]] = {}
    for row in rows:
        gaps.setdefault(row["arm"], []).append(float(row["gap"]))
    means = {arm: sum(each) / len(each) for arm, each in gaps.items()}
    text = (ROOT / "experiments" / "README.md").read_text()
    said = re.search(
        r"worse by (\d\.\d\d) ± \d\.\d\d nats\. 8, 6 and 4 bits .* most (\d\.\d+)", text
    )
    assert said
    assert float(said[1]) == round(means["w2g2"], 2)
    few = [abs(means[arm]) for arm in ("w8g8", "w6g6", "w4g4", "w4", "g4")]
    assert round(max(few), 3) <= float(said[2]) < 0.03
    assert {len(each) for each in gaps.values()} == {5}


def step_seconds(steps: Path) -> dict[str, float]:
    """The median seconds of a step, by arm, of a table with a row a step."""
    found: dict[str, list[float]] = {}
    with steps.open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["arm"], []).append(float(row["seconds"]))
    return {arm: median(b - a for a, b in pairwise(each)) for arm, each in found.items()}


def test_the_first_screens_figures_of_13b_stand_in_their_files() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()

    def below(results: Path) -> dict[str, float]:
        final: dict[str, float] = {}
        with results.open() as lines:
            for row in csv.DictReader(lines):
                if row["heldout_loss"]:
                    final[row["arm"]] = float(row["heldout_loss"])
        return {arm: final["zero3"] - loss for arm, loss in final.items()}

    folder = ROOT / "experiments" / "pretrain_13b"
    four, two = below(folder / "results.csv"), below(folder / "x2" / "results.csv")
    assert f"8-bit gathers end {four['w8']:.3f} nats below plain FSDP2" in text
    assert f"ZeRO++ {-four['zeropp']:.3f} above" in text
    assert f"another order of sums alone moves ({four['zero3_reordered']:.3f}, below)" in text
    bits = sorted(two[arm] for arm in ("w8", "w6", "zeropp", "g8_4_hadamard"))
    assert f"end {bits[0]:.3f} to {bits[-1]:.3f} *below*" in text
    assert f"order moves {two['zero3_split']:.3f}." in text


def test_what_the_results_say_of_30b_follows_from_its_results() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    final, first = {}, {}
    with (ROOT / "experiments" / "finetune_30b" / "results.csv").open() as lines:
        for row in csv.DictReader(lines):
            first.setdefault(row["arm"], float(row["loss"]))
            if row["heldout_loss"]:
                final[row["arm"]] = float(row["heldout_loss"])
    below = {arm: final["zero3"] - loss for arm, loss in final.items()}
    assert f"end {below['w4']:.3f} and {below['w2']:.3f} nats *below* plain FSDP2" in text
    assert f"another order of sums moves ({below['zero3_split']:.3f})" in text
    assert f"2 bits start {first['w2'] - first['zero3']:.2f} nats above" in text


def test_what_the_results_say_of_finetuning_follows_from_its_results() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    ends, firsts, shares, order = {}, {}, set(), []
    for size in ("350m", "1_3b"):
        with (ROOT / "experiments" / "finetune_1b" / size / "results.csv").open() as lines:
            rows = list(csv.DictReader(lines))
        loss = {(r["arm"], r["seed"]): float(r["heldout_loss"]) for r in rows if r["step"] == "60"}
        sent = {r["arm"]: int(r["bytes_intra"]) for r in rows}
        shares.add(tuple(f"{100 * sent[arm] / sent['zero3']:.0f}" for arm in ("w8", "w4")))
        for arm in ("w4", "w2"):
            ends[size, arm] = fmean(loss[arm, seed] - loss["zero3", seed] for seed in "123")
        order += [abs(loss["zero3_reordered", seed] - loss["zero3", seed]) for seed in "123"]
        firsts[size] = fmean(float(r["gap"]) for r in rows if r["arm"] == "w2" and r["step"] == "1")
        report = (ROOT / "experiments" / "finetune_1b" / size / "report.md").read_text()
        for arm, verdict in (("w8", "on par"), ("w4", "on par"), ("w2", "worse")):
            assert re.search(rf"^\| {arm} \| [^|]+ \| {verdict} \|", report, re.M), arm
        assert "zero3_reordered: on par, as it must be. Negative control broken: worse" in report
    assert shares == {("67", "51")}
    assert "with 67 and 51 % of its bytes" in text
    said = re.search(r"end (\d\.\d+) ± \d\.\d+ and (\d\.\d+) ± \d\.\d+ nats a byte above", text)
    assert said
    for place, size in ((1, "350m"), (2, "1_3b")):
        assert float(said[place]) == round(abs(ends[size, "w4"]), 4)
    assert f"worse, by {ends['350m', 'w2']:.3f} and {ends['1_3b', 'w2']:.3f}: " in text
    assert f"{firsts['350m']:.3f} and {firsts['1_3b']:.3f} at once" in text
    assert max(order) < 1e-4


def test_what_the_results_say_of_350m_follows_from_its_results() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    final: dict[tuple[str, str], float] = {}
    with (ROOT / "experiments" / "pretrain_350m" / "results.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["heldout_loss"]:
                final[row["arm"], row["seed"]] = float(row["heldout_loss"])

    def gap(arm: str) -> float:
        return fmean(final[arm, seed] - final["zero3", seed] for seed in "123")

    w4, zeropp, g84 = (gap(arm) for arm in ("w4", "zeropp", "g8_4_hadamard"))
    assert f"{w4:.3f}, {zeropp:.3f} and {g84:.3f} nats above plain ZeRO-3" in text
    assert f"another order of sums alone moved {-gap('zero3_reordered'):.3f}. That" in text
    report = (ROOT / "experiments" / "pretrain_350m" / "report.md").read_text()
    assert "Order control zero3_reordered: better, but must be on par" in report
    for arm in ("w4", "zeropp", "g8_4_hadamard"):
        assert re.search(rf"^\| {arm} \| [^|]+ \| undecided ", report, re.M), arm


def test_the_first_screens_figures_of_real_ranks_stand_in_their_files() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    for table, words in (("tiny", "54 of 54 cases at tiny"), ("125m", "58 of 58 at 125M")):
        path = ROOT / "experiments" / "parity" / "h200" / f"table-{table}.json"
        cases = json.loads(path.read_text())["results"]
        assert words in text
        assert words.startswith(f"{sum(not fault for fault in cases.values())} of {len(cases)} ")
    step = step_seconds(ROOT / "experiments" / "pretrain_13b" / "results.csv")
    said = f"{step['w8']:.3f} s and ZeRO++ {step['zeropp']:.3f} for FSDP2's {step['zero3']:.3f}"
    assert f"8-bit gathers took {said}" in text
    rows = json.loads((ROOT / "experiments" / "collectives" / "h200.json").read_text())["results"]
    reduce = [r for r in rows if (r["what"], r["mib"], r["nodes"]) == ("reduce", 640, 1)]
    times = {(r["codec"], r["transport"]): r["ms"] for r in reduce}
    peer = min(
        ms for (codec, by), ms in times.items() if codec.startswith("4 bits") and by == "peer"
    )
    assert f"{peer:.2f} ms" in text
    assert f"takes {times['backend bf16', 'backend']:.2f} (" in text


def test_what_the_results_say_of_deepspeed_follows_from_its_results() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    folder = ROOT / "experiments" / "deepspeed"
    gradients = json.loads((folder / "gradient.json").read_text())
    rows = {(r["reduction"], r["gradients"]): r for r in gradients}
    misread = rows["DeepSpeed qgZ", "bf16"]
    fp16_gradient = rows["DeepSpeed qgZ", "fp16"]
    assert f"({misread['norm_ratio']:.0f} times the norm, cosine {misread['cosine']:.2f})" in text
    assert f"is {fp16_gradient['norm_ratio']:.2f} times too large in fp16" in text
    (whole,) = json.loads((folder / "whole-host.json").read_text())
    assert whole["quantized_reductions"] == 0
    losses: dict[tuple[str, str], dict[str, float]] = {}
    with (folder / "results.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["heldout_loss"]:
                at = losses.setdefault((row["seed"], row["step"]), {})
                at[row["arm"]] = float(row["heldout_loss"])
    last = [at for (_, step), at in losses.items() if step == "120"]
    assert len(last) == 3

    def gap(arm: str) -> float:
        return sum(at[arm] - at["zero3"] for at in last) / len(last)

    band = max(
        abs(at["zero3_reordered"] - at["zero3"]) for (_, step), at in losses.items() if step != "40"
    )
    bf16, fp16, plain = gap("ds_zeropp_bf16"), gap("ds_zeropp_fp16"), gap("ds_zero3")
    assert f"{bf16:.3f} (bf16) and {fp16:.3f} nats (fp16) above plain ZeRO-3" in text
    assert f"ends {-plain:.3f} below, inside what another order of sums moves ({band:.3f})" in text


def test_what_the_results_say_of_speed_follows_from_its_table() -> None:
    table = csv.DictReader((ROOT / "experiments" / "speed" / "results.csv").open())
    rows = {(r["arm"], r["model"], r["nodes"], r["link_gbps"]): r for r in table}

    def speed(arm: str, link: str, nodes: str = "2") -> float:
        return float(rows[arm, "1_3b", nodes, link]["tokens_per_s"])

    def share(link: str) -> str:
        return f"{100 * float(rows['zeropp', '1_3b', '2', link]['share_of_floor']):.0f}"

    times = {
        (arm, over, link): f"{speed(arm, link) / speed(over, link):.1f}"
        for arm in ("zeropp", "w4_g84h")
        for over in ("fsdp2", "ds_zeropp")
        for link in ("12", "25", "50")
    }
    text = (ROOT / "experiments" / "README.md").read_text()
    own, ds, w4 = "zeropp", "ds_zeropp", "w4_g84h"
    for said in (
        f"trains {times[own, 'fsdp2', '12']} times as fast as plain FSDP2 at 12 Gb/s and "
        f"{times[own, 'fsdp2', '25']} times at 25",
        f"{times[own, ds, '12']} and {times[own, ds, '25']} times as fast as DeepSpeed's ZeRO++",
        f"at {share('12')} and {share('25')} % of what its bytes allow",
        f"{times[w4, 'fsdp2', '12']} and {times[w4, 'fsdp2', '25']} times FSDP2",
        f"at 50 Gb/s, where the host is the bound, {times[own, 'fsdp2', '50']} and "
        f"{times[w4, 'fsdp2', '50']}",
        f"ZeRO++ is {speed(own, 'max', '1') / speed('fsdp2', 'max', '1'):.2f} times as fast",
        f"takes {float(rows[own, '13b', '1', 'max']['step_s']):.3f} s for our ZeRO-3's "
        f"{float(rows['zero3', '13b', '1', 'max']['step_s']):.3f} at 13B and "
        f"{float(rows[own, '32_5b', '1', 'max']['step_s']):.3f} for "
        f"{float(rows['zero3', '32_5b', '1', 'max']['step_s']):.3f} at 32.5B",
    ):
        assert said in text, said
