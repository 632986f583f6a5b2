"""What experiments/baseline/README.md says stands in its files, and in speed's."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.experiments.scripts import loaded
from zpp_lab.memory import CONTEXT, NCCL
from zpp_lab.moments import GIB

HERE = Path(__file__).parents[2] / "experiments" / "baseline"
PARAMETERS = {"1_3b": 1_345_423_360, "13b": 13_015_864_320}
PEAK = 4 * 989e12  # operations a second of four GPUs, dense bf16
TOKENS = 16_384

Found = dict[str, dict[str, Any]]


def page() -> str:
    return (HERE / "README.md").read_text()


def results(model: str) -> Found:
    found: Found = json.loads((HERE / f"{model}.json").read_text())["results"]
    return found


def share(model: str, found: dict[str, Any]) -> float:
    return 6 * PARAMETERS[model] * float(found["tokens_per_second"]) / PEAK


def cells(model: str, name: str, found: dict[str, Any], before: float | None) -> str:
    seconds, times = found["seconds"], found["times"]
    gain = "–" if before is None else f"{before / seconds:.2f}"
    row = [f"`{name}`", f"{seconds:.4f}", f"{min(times):.4f} to {max(times):.4f}"]
    row += [f"{found['tokens_per_second']:,.0f}", gain, f"{max(found['peak_gib']):.2f}"]
    row += [f"{found['first_seconds']:.1f}", f"{share(model, found):.1%}".replace("%", " %")]
    return "| " + " | ".join(row) + " |"


def test_every_file_has_its_table() -> None:
    assert {path.stem for path in HERE.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_tables_are_their_files(model: str) -> None:
    text, before = page(), None
    assert f"({PARAMETERS[model]:,} parameters;" in text
    assert json.loads((HERE / f"{model}.json").read_text())["commit"].startswith("6c0025b")
    settings = list(loaded("experiments/baseline/run.py").SETTINGS)
    every = results(model)
    assert list(every) == settings[-len(every) :]
    for name, found in every.items():
        assert found["seconds"] == median(found["times"])
        assert found["tokens_per_second"] == pytest.approx(TOKENS / found["seconds"])
        assert cells(model, name, found, before) in text
        before = found["seconds"]


def spread(found: dict[str, Any]) -> float:
    """Percent of the median between the fastest and the slowest step."""
    return 100 * float(max(found["times"]) - min(found["times"])) / float(found["seconds"])


def test_what_is_said_of_single_steps() -> None:
    small, large = results("1_3b"), results("13b")
    text = page()
    steady = [spread(small[name]) for name in ("eager", "fused_adamw")]
    assert f"lie within {steady[0]:.1f} and {steady[1]:.1f} %" in text
    assert f"13B's within {max(map(spread, large.values())):.1f} %" in text
    wide = [spread(small[name]) for name in list(small)[2:]]
    assert f"spread by {min(wide):.0f} to {max(wide):.0f} %" in text
    kept, again = small["keep"]["times"], small["chunked_loss"]["times"]
    assert sum(t < min(kept) for t in again) == 3
    assert sum(t > max(kept) for t in again) == 2
    assert sorted(round(t, 3) for t in small["deterministic"]["times"])[:3] == [0.146, 0.162, 0.186]


def test_the_factors_in_the_text() -> None:
    small, large, text = results("1_3b"), results("13b"), page()
    best, slow = large["keep"]["seconds"], large["deterministic"]["seconds"]
    assert f"**{best:.3f} s a step**" in text
    assert f"{1.01 / best:.2f} and {1.01 / slow:.2f} times as fast" in text
    assert f"cost {100 * (slow / best - 1):.1f} % at 13B" in text
    more = small["deterministic"]["seconds"] / small["keep"]["seconds"]
    assert f"costs {100 * (more - 1):.0f} % more, at 13B {100 * (slow / best - 1):.0f} %" in text
    whole = small["eager"]["seconds"] / small["chunked_loss"]["seconds"]
    assert f"{whole:.1f} times from `eager` to `chunked_loss`" in text
    first = (HERE.parent / "README.md").read_text()
    assert f"{best:.3f} s a step of {TOKENS:,} tokens at 13B ({slow:.3f} with" in first
    assert f"{1.01 / best:.2f} times as fast" in first
    assert f"at {share('13b', large['keep']):.0%}".replace("%", " %") in first
    small_share = f"{share('1_3b', small['chunked_loss']):.0%}".replace("%", " %")
    assert f"{small['chunked_loss']['seconds']:.3f} s, {whole:.1f} times" in first
    assert f"at {small_share}, where the host" in first


def test_what_is_said_of_the_speed_study() -> None:
    with (HERE.parent / "speed" / "results.csv").open() as lines:
        table = {
            (r["arm"], r["model"], r["nodes"], r["link_gbps"]): r for r in csv.DictReader(lines)
        }
    theirs, text = table["fsdp2", "1_3b", "1", "max"], page()
    ours = [results("1_3b")[name] for name in ("flash", "chunked_loss")]
    config = json.loads(theirs["config"])
    assert (config["train.batch_size"], theirs["tokens_per_step"]) == (1, "8192")
    assert "engine.compile" not in config
    steps = [float(theirs["step_s"]), *(found["seconds"] for found in ours)]
    speeds = [float(theirs["tokens_per_s"]), *(found["tokens_per_second"] for found in ours)]
    assert "| s a step | " + " | ".join(f"{s:.4f}" for s in steps) + " |" in text
    assert "| tokens/s | " + " | ".join(f"{round(s):,}" for s in speeds) + " |" in text
    factors = [speeds[1] / speeds[0], speeds[2] / speeds[1], speeds[2] / speeds[0]]
    assert f"{factors[0]:.2f} × {factors[1]:.2f} = {factors[2]:.2f}" in text
    assert f"waits {1000 * float(theirs['waiting_s']):.1f} ms of {1000 * steps[0]:.0f}" in text
    for link in ("12", "25"):
        for arm in ("fsdp2", "zeropp"):
            row = table[arm, "1_3b", "2", link]
            assert f"{float(row['step_s']):.{2 if arm == 'fsdp2' else 3}f}" in text
            assert f"{100 * float(row['share_of_floor']):.0f}" in text
        assert f"{float(table['zeropp', '1_3b', '2', link]['link_s']):.3f}" in text
    said = (HERE.parent / "speed" / "README.md").read_text()
    assert f"{round(speeds[2]):,}".replace(",", " ") + " tokens/s of plain ZeRO-3" in said
    assert f"{factors[0]:.2f} times from two sequences" in said
    assert f"{factors[1]:.2f} times from compiled blocks" in said


# ---------------------------------------------------------------------- parts on two GPUs

PARTS = loaded("experiments/baseline/halves.py").parts
LAYERS, WIDTH, HIDDEN, WORDS = 60, 6656, 17920, 32000
LARGEST = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * HIDDEN + 2 * WIDTH) + 2 * WORDS * WIDTH + WIDTH


def two(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "two" / f"{name}.json").read_text())
    assert len(found["machine"]["gpus"]) == 2
    return found


def test_the_sums_of_parts() -> None:
    text, four = page(), results("13b")["keep"]["seconds"]
    small, large = PARTS(two("13b")["results"]), PARTS(two("32_5b")["results"])
    for made, said in ((small, "13B, 2 sequences a GPU"), (large, "32.5B, 1 sequence a GPU")):
        cells = f"{made.passes:.4f} | {made.half:.4f} | {made.half_passes:.4f} | {made.update:.4f}"
        assert f"| {said} | {cells} | **{made.step:.3f}** |" in text
    assert f"**From parts that two GPUs can hold it takes {large.step:.3f} s**" in text
    above = 100 * (small.step / four - 1)
    assert f"the same sum gives {above:.1f} % more" in text
    assert f"by {above:.1f} % at 13B" in text
    speed = 8192 / large.step
    share = f"{6 * LARGEST * speed / PEAK:.1%}".replace("%", " %")
    assert f"would be {speed:,.0f} tokens/s, {share} of" in text
    assert f"{1.39 / large.step:.2f} times as fast as the earlier" in text
    plain = two("32_5b-eager")["results"]["chunked_loss 60 layers, no update"]["seconds"]
    with (HERE.parent / "speed" / "results.csv").open() as lines:
        rows = [r for r in csv.DictReader(lines) if (r["arm"], r["model"]) == ("zero3", "32_5b")]
    (measured,) = [float(r["step_s"]) for r in rows]
    over = 100 * ((plain + large.update) / measured - 1)
    assert f"by {over:.1f} % at 32.5B without the compiler" in text
    assert f"{plain:.4f} (`two/32_5b-eager.json`) and {large.update:.4f} s" in text
    assert f"in place of the {measured:.4f} of" in text
    assert f"and {over:.1f} % more at 32.5B" in text
    first = (HERE.parent / "README.md").read_text()
    assert f"{large.step:.3f} s at 32.5B, put together from parts" in first


def test_where_gradients_lie() -> None:
    text = page()
    here, apart = two("32_5b")["results"], two("apart/32_5b")["results"]
    assert two("32_5b")["commit"] == two("apart/32_5b")["commit"]
    for name, said in (
        ("keep 60 layers, no update", "60 layers, no update"),
        ("keep 30 layers", "30 layers"),
        ("keep 30 layers, no update", "30 layers, no update"),
    ):
        one, other = here[name], apart[name]
        assert max(one["peak_gib"]) == pytest.approx(max(other["peak_gib"]), abs=0.01)
        tried = [max(found["retries"]) for found in (other, one)]
        row = f"{said} | {max(one['peak_gib']):.2f} | {other['seconds']:.4f} | {tried[0]}"
        assert f"| {row} | {one['seconds']:.4f} | {tried[1]} |" in text
    assert f"| sum | | {PARTS(apart).step:.3f} | | {PARTS(here).step:.3f} | |" in text
    name = "keep 60 layers, no update"
    assert f"by itself puts them, 32.5B's parts come to {PARTS(apart).step:.3f} s" in text
    assert f"all {4 * LARGEST / 2 / GIB:.1f} GiB of gradients" in text
    cost = apart[name]["seconds"] - here[name]["seconds"]
    assert f"Two retries a step cost {cost:.2f} s" in text
    again = two("32_5b-again")["results"]["chunked_loss 60 layers, no update"]
    assert max(again["retries"]) == 0
    more = again["seconds"] - here[name]["seconds"]
    assert f"at the price of {more:.2f} s: {again['seconds']:.4f} s for 60 layers" in text
    assert again["seconds"] < apart[name]["seconds"]
    architecture = (HERE.parents[1] / "ARCHITECTURE.md").read_text()
    both = f"{here[name]['seconds']:.3f} s that way and {apart[name]['seconds']:.3f} the other"
    assert both in architecture


def test_the_room_for_gaps() -> None:
    """What devices had in use beyond tensors and what the plan assumes, where nothing was fetched
    again."""
    every = [
        one
        for name in ("32_5b", "32_5b-again", "32_5b-eager", "32_5b-host")
        for one in two(name)["results"].values()
        if max(one["retries"]) == 0
    ]
    gaps = [one["used_gib"] - max(one["peak_gib"]) - (CONTEXT + NCCL) / GIB for one in every]
    guide = (HERE.parents[1] / "GUIDE.md").read_text()
    assert f"room for its gaps, {min(gaps):.0f} to {max(gaps):.0f} GiB at 32.5B" in guide


def test_moments_in_host_memory() -> None:
    again, kept = (two("32_5b-host")["results"][name] for name in ("chunked_loss", "keep"))
    said = (
        f"takes {again['seconds']:.3f} s with activations computed again and {kept['seconds']:.3f}"
    )
    assert said in page()
    assert max(again["retries"]) == 0
    tried = f"{max(kept['retries'])} times in six steps"
    assert len(kept["times"]) == 6
    assert tried in page()


def test_no_bit_changed_with_where_gradients_lie() -> None:
    table = two("table")
    assert table["commit"] == two("32_5b")["commit"]
    differing = [case for case, what in table["results"].items() if what]
    assert not differing
    again = two("table-again")
    assert again["commit"].startswith("087e319")
    assert again["results"] == table["results"]
    assert f"({len(table['results'])} of {len(table['results'])} recipes equal" in page()
