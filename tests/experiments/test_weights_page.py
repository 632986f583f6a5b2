"""experiments/finetune_weights: what its page says stands in its results and in its runs."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import yaml

from tests.experiments.published import (
    EXPERIMENTS,
    SEEDS,
    gaps,
    minus,
    runs,
    signed,
    spread,
    steps,
    summaries,
    sure,
    training,
)
from tests.experiments.scripts import ROOT, loaded
from zpp_lab.study.holm import holm
from zpp_lab.study.stats import p_values, t_interval

STUDY, BEFORE = "finetune_weights", "finetune_wires_older"
HERE = EXPERIMENTS / STUDY
TEXT = (HERE / "README.md").read_text()
REPORT = (HERE / "report.md").read_text()
SCRIPT = "experiments/finetune_weights/paired.py"
WAYS = ("block64", "block32", "asymmetric", "block64_asymmetric", "hadamard64", "inner")
NEAREST = ("w4", *(f"w4_{way}" for way in WAYS))
TWO = ("w2", "w2_block64", "w2_block64_asymmetric")
ARMS = ("w8", "w6", *NEAREST, "w4_stochastic", *TWO)
BOTH = ("bytes_intra", "bytes_inter")


@cache
def rounded() -> dict[str, list[float]]:
    """The baseline's gap once it is rounded, by seed."""
    found: dict[str, list[float]] = {}
    with (HERE / "rounded.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["seed"]) for row in rows] == sorted(int(row["seed"]) for row in rows)
    for row in rows:
        gap = float(row["rounded_loss"]) - float(row["baseline_loss"])
        found.setdefault(row["arm"], []).append(gap)
    return found


def sent(arm: str, keys: tuple[str, ...] = BOTH) -> int:
    return sum(int(steps(STUDY)[arm, 2, 1][key]) for key in keys)


def masters(arm: str, over: str) -> float:
    own = [summaries(STUDY)[f"{arm}/seed{s}"]["heldout_loss_master"] for s in SEEDS]
    return fmean(minus(own, [summaries(STUDY)[f"{over}/seed{s}"]["heldout_loss"] for s in SEEDS]))


def nmse(arm: str, kind: str) -> float:
    found = [
        json.loads(line)["telemetry"]["weights_forward"][kind]["nmse"]
        for seed in SEEDS
        for line in runs(STUDY, "metrics.jsonl")[f"{arm}/seed{seed}"].splitlines()
        if "telemetry" in line
    ]
    assert len(found) == 9
    return fmean(found)


@pytest.mark.parametrize("arm", ["zero3", "zero3_reordered", *ARMS, "broken"])
def test_the_table_follows_from_results(arm: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{arm}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    seeds = [2] if arm == "broken" else SEEDS
    assert cells[2] == f"{fmean(steps(STUDY)[arm, s, 60]['heldout_loss'] for s in seeds):.4f}"
    shares = [100 * sent(arm, k) / sent("zero3", k) for k in (BOTH, ("bytes_inter",))]
    assert cells[5:7] == [f"{share:.1f}%".replace("100.0", "100") for share in shares]
    told = next(line for line in REPORT.splitlines() if line.startswith(f"| {arm} |"))
    verdict, gap = (told.split("|")[place].strip() for place in (3, 4))
    assert cells[7].startswith(verdict)
    assert cells[3] == gap
    if arm not in ("zero3", "broken"):
        assert cells[4] == ", ".join(signed(each, 5) for each in gaps(STUDY, arm))
        assert gap.lstrip("+") == spread(gaps(STUDY, arm)).lstrip("+−")
    if arm in ARMS:
        assert cells[7] == f"{verdict}; p = {sure(STUDY, arm)[2]}"


def test_the_tables_are_those_of_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["paired.py", str(HERE)])
    assert script.main() == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 3
    assert all(table in TEXT for table in tables)
    monkeypatch.setattr(sys, "argv", ["paired.py"])
    assert script.main() == 2
    assert "rounded.csv" in capsys.readouterr().err


MORE = (*NEAREST[1:], "w4_stochastic", *TWO[1:])


@pytest.mark.parametrize("arm", MORE)
def test_the_script_pairs_with_the_plain_codec_as_results_do(arm: str) -> None:
    script = loaded(SCRIPT)
    lines = script.codecs(script.Study(HERE)).splitlines()
    cells = next(row for row in lines if row.startswith(f"| {arm} |")).strip("| ").split(" | ")
    plain = arm[:2]
    apart = minus(gaps(STUDY, arm), gaps(STUDY, plain))
    p = p_values(apart, 1.0)[0]
    assert p is not None
    assert cells[1:4] == [plain, f"{100 * sent(arm) / sent(plain):.1f}%", spread(apart)]
    assert cells[4] == ", ".join(signed(gap, 4) for gap in apart)
    assert cells[5] == (f"{p:.4f}" if p >= 5e-5 else "< 0.0001")
    assert cells[6] == spread(minus(training(STUDY, arm), training(STUDY, plain)))


def test_what_is_said_against_the_plain_codec_follows() -> None:
    apart = {arm: minus(gaps(STUDY, arm), gaps(STUDY, arm[:2])) for arm in MORE}
    ps = holm({arm: p for arm in MORE if (p := p_values(apart[arm], 1.0)[0]) is not None})
    two = [f"{-fmean(apart[arm]):.3f}" for arm in TWO[1:]]
    assert "take {} off the gap, with a zero point besides {}, alike".format(*two) in TEXT
    assert f"(p = {ps[TWO[1]]:.4f} and {ps[TWO[2]]:.4f})" in TEXT
    assert min(ps[arm] for arm in NEAREST[1:]) > 0.05
    ahead = [apart[arm] for arm in NEAREST[1:5]]  # blocks and zero points
    assert max(max(each) for each in ahead) < 0
    means = sorted(-fmean(each) for each in ahead)
    assert f"ahead in every seed, by {means[0]:.4f} to {means[-1]:.4f} on average" in TEXT
    lowest = min(fmean(gaps(STUDY, arm)) for arm in NEAREST)
    assert fmean(gaps(STUDY, "w4_block64_asymmetric")) == lowest
    zero, both = (100 * sent(f"w4_{way}") / sent("w4") - 100 for way in WAYS[2:4])
    said = f"{zero:.1f} % more bytes than `w4`, for which the mean falls by"
    assert f"{said} {-fmean(apart['w4_asymmetric']):.4f} nats" in TEXT
    assert f"lowest on average ({lowest:.4f}) for {both:.1f} %" in TEXT
    assert f"the gain, {spread(apart['w4_inner']).lstrip('−')}, is not shown" in TEXT
    whole = {arm: minus(training(STUDY, arm), training(STUDY, arm[:2])) for arm in MORE}
    below = {arm for arm in NEAREST[1:] if t_interval(whole[arm], 0.95)[1] < 0}
    assert below == {f"w4_{way}" for way in ("block32", "block64", "block64_asymmetric", "inner")}
    assert f"blocks of 32 ({spread(whole['w4_block32'])}) and of 64" in TEXT
    ps = holm({arm: p for arm in MORE if (p := p_values(whole[arm], 1.0)[0]) is not None})
    assert f"(p = {min(ps[arm] for arm in below):.2f} at least)" in TEXT


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "w4_inner"])
def test_the_script_pairs_with_rounding_afterwards_as_its_file_does(arm: str) -> None:
    script = loaded(SCRIPT)
    lines = script.afterwards(script.Study(HERE), script.rounded(HERE)).splitlines()
    cells = next(row for row in lines if row.startswith(f"| {arm} |")).strip("| ").split(" | ")
    kinds = (gaps(STUDY, arm), rounded()[arm], minus(gaps(STUDY, arm), rounded()[arm]))
    assert cells[1:4] == [spread(each) for each in kinds]


def flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def test_arms_differ_in_the_codec_of_weights_alone() -> None:
    def settings(arm: str) -> dict[str, Any]:
        return dict(flat(yaml.safe_load(runs(STUDY, "config.yaml")[f"{arm}/seed2"])))

    plain = settings("w4")
    for arm in ARMS:
        own = settings(arm)
        seen = {name for name in own.keys() | plain.keys() if own.get(name) != plain.get(name)}
        seen -= {"run.dir", "run.arm", "recipe.name"}
        assert bool(seen) == (arm != "w4")
        expected = {"recipe.exempt.names"} if arm == "w4_inner" else set()
        assert {name for name in seen if not name.startswith("recipe.weights.")} == expected
        hashes = {summaries(STUDY)[f"{a}/seed2"]["data"]["hash"] for a in (arm, "zero3")}
        assert len(hashes) == 1


def test_what_is_said_of_verdicts_follows() -> None:
    margin = 0.0025 * fmean(steps(STUDY)["zero3", s, 60]["heldout_loss"] for s in SEEDS)
    assert f"On par within ±{margin:.4f} (0.25 %)" in TEXT
    for arm in NEAREST:
        low, _ = t_interval(gaps(STUDY, arm), 0.95)
        assert low > 0
        assert min(gaps(STUDY, arm)) > 0
        assert sure(STUDY, arm)[2] == "0.1581"
        assert float(sure(STUDY, arm)[4]) > 0.05
        assert sure(STUDY, arm)[7].startswith("+0.")
    means = sorted(fmean(gaps(STUDY, arm)) for arm in NEAREST)
    base = fmean(steps(STUDY)["zero3", s, 60]["heldout_loss"] for s in SEEDS)
    ends = [100 * mean / base for mean in (means[0], means[-1])]
    said = f"{means[0]:.4f} to {means[-1]:.4f} on average, {ends[0]:.2f} to {ends[1]:.2f} % of"
    assert said in TEXT
    assert f"worse,** by {fmean(gaps(STUDY, 'w4_stochastic')):.4f}: eight times" in TEXT
    assert round(fmean(gaps(STUDY, "w4_stochastic")) / fmean(gaps(STUDY, "w4"))) == 8
    said = "{:.3f} nats above with blocks of 256, {:.3f} with blocks of 64, {:.3f} with a zero"
    assert said.format(*(fmean(gaps(STUDY, arm)) for arm in TWO)) in TEXT
    shares = [f"{100 * sent(arm) / sent('zero3'):.0f}" for arm in TWO]
    assert "for {}, {} and {} % of the bytes".format(*shares) in TEXT
    assert "Use w6 " in REPORT
    half = spread(gaps(STUDY, "w6")).split(" ± ")[1]
    share = 100 * sent("w6") / sent("zero3")
    assert f"6 bits are known to ±{half} nats at {share:.0f} % of the bytes" in TEXT
    assert "none differs (p = 0.1581)" in TEXT
    order = max(map(abs, gaps(STUDY, "zero3_reordered")))
    assert f"Another order of sums moves {order:.5f} held out" in TEXT


def test_why_w4_is_worse_there_and_undecided_here() -> None:
    ps = {arm: p_values(gaps(STUDY, arm), 1.0)[0] for arm in ARMS}
    alone = {arm: p for arm, p in ps.items() if p is not None}
    corrected = holm(alone)
    assert {arm: f"{corrected[arm]:.4f}" for arm in ARMS} == {
        arm: sure(STUDY, arm)[2] for arm in ARMS
    }
    assert f"by itself, {alone['w4']:.4f}" in TEXT
    order = sorted(alone, key=alone.__getitem__)
    assert order[4] == "w4_block32"  # after four that are clear
    assert max(corrected[arm] for arm in order[:4]) < 0.05
    assert f"`w4_block32` with {alone['w4_block32']:.4f}, which counts nine times" in TEXT
    assert corrected["w4"] == pytest.approx(9 * alone["w4_block32"])
    assert len(ARMS) - 4 == 9
    assert sure(BEFORE, "w4")[1:3] == [f"{alone['w4']:.4f}", "0.0434"]
    assert "and holds (0.0434); here it is one of thirteen" in TEXT


def test_what_is_said_of_training_with_a_codec_follows() -> None:
    tried = [arm for arm in ARMS if arm not in ("w4_inner", "w4_stochastic")]
    apart = {arm: minus(gaps(STUDY, arm), rounded()[arm]) for arm in tried}
    better = [arm for arm in tried if arm not in ("w8", "w6")]
    assert len(better) == 9
    for arm in better:
        assert max(apart[arm]) < 0
        assert t_interval(apart[arm], 0.95)[1] < 0
    alone = {arm: p for arm in tried if (p := p_values(apart[arm], 1.0)[0]) is not None}
    corrected = holm(alone)
    held = {arm for arm in tried if corrected[arm] <= 0.05}
    assert held == {*TWO, "w4_asymmetric", "w4_hadamard64"}
    assert f"(p = {max(corrected[arm] for arm in held):.4f} at most)" in TEXT
    rest = {f"{corrected[arm]:.3f}" for arm in better if arm not in held}
    assert rest == {"0.056", "0.061"}
    assert "the other four are at 0.056 and 0.061" in TEXT
    after = {arm: fmean(found) for arm, found in rounded().items()}
    said = (
        f"leave {fmean(gaps(STUDY, 'w4')):.4f} above plain ZeRO-3 where rounding afterwards leaves"
    )
    assert f"{said} {after['w4']:.4f}, paired {spread(apart['w4'])}; 2 bits" in TEXT
    assert (
        f"2 bits {fmean(gaps(STUDY, 'w2')):.2f} where rounding ruins the model, {after['w2']:.2f}"
        in TEXT
    )
    costs = (spread(rounded()[arm]).lstrip("+") for arm in ("w8", "w6"))
    assert "rounding afterwards costs {} and {}.".format(*costs) in TEXT
    both = "w4_block64_asymmetric"
    said = f"{-fmean(apart['w4']):.4f} of the plain one's {after['w4']:.4f}"
    assert f"{said}, {-fmean(apart[both]):.4f} of the {after[both]:.4f} of" in TEXT
    said = f"is {after[both]:.4f} above, where `w4` trained is {fmean(gaps(STUDY, 'w4')):.4f}"
    assert said in TEXT
    trained = fmean(gaps(STUDY, "w2"))
    two = f"at 2 bits it is {after[TWO[2]]:.3f} above, and `w2` trained {trained:.3f}"
    assert two in TEXT
    noisy = minus(gaps(STUDY, "w4_stochastic"), rounded()["w4"])
    assert rounded()["w4_stochastic"] == rounded()["w4"]
    assert f"its model is {spread(noisy).lstrip('+')} worse" in TEXT


def test_evaluating_again_moved_the_baseline_by_what_is_said() -> None:
    with (HERE / "rounded.csv").open() as lines:
        again = {int(row["seed"]): float(row["baseline_loss"]) for row in csv.DictReader(lines)}
    own = {s: steps(STUDY)["zero3", s, 60]["heldout_loss"] for s in SEEDS}
    assert f"by {max(abs(again[s] - own[s]) for s in SEEDS):.6f} at most" in TEXT


def test_what_is_said_of_errors_follows() -> None:
    noisy, plain = (nmse(arm, "attention") for arm in ("w4_stochastic", "w4"))
    assert f"twice the square ({noisy:.4f} for {plain:.4f})" in TEXT
    assert noisy / plain == pytest.approx(2, rel=0.01)
    both = "w4_block64_asymmetric"
    share = 100 * fmean(gaps(STUDY, both)) / fmean(gaps(STUDY, "w4"))
    said = f"`w4`'s error ({nmse(both, 'attention'):.4f} for {plain:.4f}) and leave {share:.0f} %"
    assert said in TEXT
    zero, block, small = (nmse(f"w4_{way}", "attention") for way in (WAYS[2], *WAYS[:2]))
    said = f"alone ({zero:.4f}) ends lower on average than blocks of 64 ({block:.4f}) and 32"
    assert f"{said} ({small:.4f}), whose" in TEXT
    ends = [fmean(gaps(STUDY, f"w4_{way}")) for way in (WAYS[2], *WAYS[:2])]
    assert ends[0] == min(ends)
    heads = [nmse(arm, "head") for arm in ("w4_hadamard64", "w4")]
    assert "it is larger ({:.4f} for {:.4f})".format(*heads) in TEXT
    first = {
        arm: fmean(training(STUDY, arm, 1, 1)) for arm in ("w4", "w4_hadamard64", "w4_stochastic")
    }
    assert f"({first['w4_hadamard64']:.4f} for {first['w4']:.4f} in step 1)" in TEXT
    assert f"it costs {first['w4_stochastic']:.4f} at once for {first['w4']:.4f}" in TEXT
    late = [fmean(training(STUDY, arm, 41)) for arm in ("w4_stochastic", "w4")]
    assert "{:.4f} in the training loss of steps 41 to 60 (`w4`: {:.4f})".format(*late) in TEXT
    for arm in (*NEAREST, *TWO, "w4_stochastic"):  # backward has weights of its own in one arm
        record = json.loads(runs(STUDY, "metrics.jsonl")[f"{arm}/seed1"].splitlines()[0])
        told = record["telemetry"].get("weights_backward", {}).get("mlp", {"nmse": 0})
        assert (told["nmse"] > 0) == (arm == "w4_stochastic")
    for arm in (*NEAREST, *TWO):
        assert fmean(training(STUDY, arm, 41)) < fmean(training(STUDY, arm, 1, 1))
        assert masters(arm, arm) > 0
    noisy = masters("w4_stochastic", "w4_stochastic")
    said = f"are {-noisy:.4f} *better* than their wire, and still"
    assert f"{said} {masters('w4_stochastic', 'zero3'):.4f} above plain ZeRO-3" in TEXT


def test_steps_apart_are_the_reports() -> None:
    named = re.findall(r"(w\w+) seed (\d) step (\d+) \(([\d.]+) for ([\d.]+)\)", REPORT)
    assert len(named) == 3
    for arm, seed, step, norm, others in named:
        assert f"seed {seed} step {step} (" in TEXT
        assert f"{norm} for {others})" in TEXT
        own = steps(STUDY)[arm, int(seed), int(step)]["grad_norm"]
        assert f"{own:.3g}" == norm
        assert arm in TWO
    assert f"({steps(STUDY)['w2', 3, 31]['grad_norm']:.2f}), but no longer named" in TEXT


def test_what_the_other_pages_say_follows() -> None:
    first = (ROOT / "experiments" / "README.md").read_text()
    line = next(row for row in first.splitlines() if "](finetune_weights)" in row)
    shares = [f"{100 * sent(arm) / sent('zero3'):.0f}" for arm in ("w8", "w6")]
    assert "at {} and {} % of the bytes".format(*shares) in line
    means = sorted(fmean(gaps(STUDY, arm)) for arm in NEAREST)
    assert f"{means[0]:.4f} to {means[-1]:.4f} above" in line
    assert f"({spread(gaps(STUDY, 'w4_stochastic')).lstrip('+')})" in line
    two = [fmean(gaps(STUDY, arm)) for arm in TWO]
    assert f"2 bits from {two[0]:.3f} down to {two[2]:.3f}" in line
    guide = (ROOT / "GUIDE.md").read_text()
    more = [100 * sent(arm) / sent("w4") - 100 for arm in ("w4_asymmetric", "w4_block64")]
    zero, block = (fmean(gaps(STUDY, arm)) for arm in ("w4_asymmetric", "w4_block64"))
    plain = fmean(gaps(STUDY, "w4"))
    said = f"for {more[0]:.1f} % more bytes than `w4` it ended {zero:.4f} nats above in place of"
    assert f"{said} {plain:.4f}, blocks of 64" in guide
    assert f"{block:.4f} for {more[1]:.1f} % more" in guide
    assert f"take both: {two[2]:.3f} in place of {two[0]:.3f}" in guide
    assert f"rounding of 4 bits cost {fmean(gaps(STUDY, 'w4_stochastic')):.3f}" in guide
