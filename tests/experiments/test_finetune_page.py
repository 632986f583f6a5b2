"""experiments/finetune_1b: what its page says stands in its results and in the runs themselves."""

from __future__ import annotations

import json
import math
import re
import tarfile
from statistics import fmean

import pytest

from tests.experiments.published import EXPERIMENTS, SEEDS, gaps, signed, steps, summaries
from tests.experiments.scripts import loaded

HERE = EXPERIMENTS / "finetune_1b"
TEXT = (HERE / "README.md").read_text()
SIZES = ("350m", "1_3b")
ARMS = ("zero3", "zero3_reordered", "w8", "w4", "w2", "broken")
COMMIT = "6c0025b7a6dab577eb594b45a11c7ccb0532173e"


def of(size: str) -> str:
    """A size's folder, as `published` takes it."""
    return f"finetune_1b/{size}"


def over_seeds(size: str, arm: str, key: str, step: int) -> float:
    return fmean(steps(of(size))[arm, seed, step][key] for seed in SEEDS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arm", ARMS)
def test_the_tables_follow_from_results(size: str, arm: str) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith(f"| `{arm}` |")]
    cells = [cell.strip() for cell in rows[SIZES.index(size)].strip("|").split("|")]
    loss = over_seeds(size, arm, "heldout_loss", 60)
    assert cells[1:3] == [f"{loss:.4f}", f"{math.exp(loss):.4g}"]
    if arm != "zero3":
        found = gaps(of(size), arm, 60)
        assert abs(float(cells[3].split(" ")[0].replace("−", "-")) - fmean(found)) < 5.1e-5
        assert cells[4] == ", ".join(signed(gap, 5) for gap in found)
    sent = steps(of(size))[arm, 1, 1]["bytes_intra"]
    whole = steps(of(size))["zero3", 1, 1]["bytes_intra"]
    share = f"{100 * sent / whole:.1f}".removesuffix(".0")
    assert cells[5:7] == [f"{sent / 1e9:.3g}", f"{share}%"]
    report = (HERE / size / "report.md").read_text()
    verdict = next(line for line in report.splitlines() if line.startswith(f"| {arm} |"))
    assert cells[7].startswith(verdict.split("|")[3].strip())
    assert cells[3].replace("–", "") in verdict
    if p := re.search(r"p = ([\d.]+)", cells[7]):
        sure = [line for line in report.splitlines() if line.startswith(f"| {arm} |")][1]
        assert sure.split("|")[3 if arm == "w2" else 5].strip() == p[1]


@pytest.mark.parametrize("size", SIZES)
def test_the_windows_are_those_of_their_command(size: str) -> None:
    script = loaded("experiments/windows.py")
    for arm, found in script.gaps(HERE / size / "results.csv").items():
        windows = ((0, 1), (1, 5), (5, 20), (20, 40), (40, 60))
        cells = [script.spread(found, *window) for window in windows]
        assert f"| {arm} | {' | '.join(cells)} |" in TEXT


def test_all_runs_name_their_commit_machine_and_torch() -> None:
    for size in SIZES:
        found = summaries(of(size))
        assert len(found) == 19
        for name, summary in found.items():
            assert summary["commit"] == COMMIT, name
            assert summary["versions"]["torch"] == "2.11.0"
            assert set(summary["machine"]["gpus"]) == {"NVIDIA H200"}
            assert summary["outcome"] == "finished"
    assert f"commit {COMMIT[:7]}" in TEXT


def test_what_is_said_of_two_bits_follows() -> None:
    small, large = [
        over_seeds(size, "w2", "loss", 1) - over_seeds(size, "zero3", "loss", 1) for size in SIZES
    ]
    assert f"cost {small:.3f} and {large:.3f} nats more" in TEXT
    ends = [", ".join(f"{fmean(gaps(of(s), 'w2', at)):.3f}" for at in (20, 40, 60)) for s in SIZES]
    assert f"held out {ends[0]} at steps 20, 40, 60, and {ends[1]}" in TEXT
    w2 = [over_seeds(size, "w2", "heldout_loss", 60) for size in SIZES]
    at = [[over_seeds(s, "zero3", "heldout_loss", step) for step in (20, 40, 60)] for s in SIZES]
    assert f"2 bits end ({w2[1]:.3f}) where plain ZeRO-3 was at step 40 ({at[1][1]:.3f})" in TEXT
    assert f"({w2[0]:.3f}) between its steps 20 and 40 ({at[0][0]:.3f}, {at[0][1]:.3f})" in TEXT
    masters = {
        (size, arm): [
            fmean(summaries(of(size))[f"{arm}/seed{seed}"][key] for seed in SEEDS)
            for key in ("heldout_loss_master", "heldout_loss")
        ]
        for size in SIZES
        for arm in ("w2", "w4")
    }
    two = [masters[size, "w2"] for size in SIZES]
    four = [masters[size, "w4"] for size in SIZES]
    assert f"held-out loss of {two[0][0]:.3f} and {two[1][0]:.3f}, " in TEXT
    assert f"{two[0][0] - two[0][1]:.2f} and {two[1][0] - two[1][1]:.2f} above the same" in TEXT
    assert f"For `w4` it is {four[0][0] - four[0][1]:.3f} and {four[1][0] - four[1][1]:.3f}" in TEXT


@pytest.mark.parametrize("size", SIZES)
def test_the_weights_stay_as_far_from_the_levels_as_they_were(size: str) -> None:
    with tarfile.open(HERE / size / "runs.tar.xz") as runs:
        files = [m for m in runs if re.search(r"/w2/seed\d/metrics.jsonl$", m.name)]
        lines = [line for m in files if (f := runs.extractfile(m)) is not None for line in f]
    told = [row for row in map(json.loads, lines) if "telemetry" in row]
    assert [row["step"] for row in told] == [1, 30, 60] * 3
    for row in told:
        for kind in ("attention", "mlp"):
            error = row["telemetry"]["weights_forward"][kind]
            assert (round(error["nmse"], 2), round(error["zeroed"], 2)) == (0.65, 0.87)
    assert "has 65 % of the weights' sum of squares and 87 % of the weights become 0" in TEXT


def test_how_far_the_finetuning_came_follows() -> None:
    bases = [summaries(of(size))["prepare/base"]["heldout_loss"] for size in SIZES]
    assert f"held-out loss of {bases[0]:.3f} (0.30B; perplexity {math.exp(bases[0]):.2f})" in TEXT
    assert f"and {bases[1]:.3f} (1.22B; {math.exp(bases[1]):.2f}) is on Python" in TEXT
    first = [over_seeds(size, "zero3", "loss", 1) for size in SIZES]
    own = [
        ", ".join(f"{steps(of(s))['zero3', seed, 1]['loss']:.3f}" for seed in SEEDS) for s in SIZES
    ]
    assert f"{first[0]:.3f} and {first[1]:.3f} (means; {own[0]} and {own[1]} by seed)" in TEXT
    held = [[over_seeds(s, "zero3", "heldout_loss", at) for at in (20, 40, 60)] for s in SIZES]
    said = [", ".join(f"{loss:.3f}" for loss in each) for each in held]
    assert f"stands at {said[0]} and {said[1]} after 20, 40 and 60 steps" in TEXT
    won = [start - each[-1] for start, each in zip(first, held, strict=True)]
    assert f"{won[0]:.2f} and {won[1]:.2f} nats below that" in TEXT
    lost = [fmean(gaps(of(size), "w2", 60)) for size in SIZES]
    share = [f"{100 * gap / all_:.0f}" for gap, all_ in zip(lost, won, strict=True)]
    assert f"leave is {share[0]} and {share[1]} % of what" in TEXT


def test_what_is_said_of_noise_follows() -> None:
    parted = []
    for size in SIZES:
        at = steps(of(size))
        for seed in SEEDS:
            pairs = [(at["zero3", seed, s], at["zero3_reordered", seed, s]) for s in range(1, 61)]
            loss = [abs(a["loss"] - b["loss"]) for a, b in pairs]
            norm = [abs(b["grad_norm"] / a["grad_norm"] - 1) for a, b in pairs]
            parted.append(next(i for i, gap in enumerate(loss, 1) if gap))
            assert next(i for i, gap in enumerate(norm, 1) if gap) in (1, 2)
            assert max(loss) < 0.00025
            assert max(norm[:4]) < 3e-11
            assert max(norm) < 0.002
        assert "stand apart: in" not in (HERE / size / "report.md").read_text()
    assert "from steps {}, {} and {} (0.30B) and {}, {} and {} (1.22B) on".format(*parted) in TEXT
    most = [max(map(abs, gaps(of(size), "zero3_reordered", 60))) for size in SIZES]
    assert f"At the end {most[0]:.5f} and {most[1]:.5f} are left at most" in TEXT
    assert max(abs(gap) for size in SIZES for gap in gaps(of(size), "w8", 60)) < 0.00025


def test_what_is_said_of_four_bits_follows() -> None:
    end = sorted(abs(gap) for size in SIZES for gap in gaps(of(size), "w4", 60))
    assert f"{end[0]:.4f} to {end[-1]:.4f} with both signs" in TEXT
    small, large = (
        [fmean(steps(of(size))["w4", seed, s]["gap"] for s in range(1, 61)) for seed in SEEDS]
        for size in SIZES
    )
    assert "by {:.4f}, {:.4f} and {:.4f} in the three seeds".format(*small) in TEXT
    words = [signed(gap, 4) for gap in large]
    assert f"it is {words[0]}, {words[1]} and {words[2]};" in TEXT
    at_40 = sorted(gaps(of("1_3b"), "w4", 40))
    assert f"two seeds are {at_40[2]:.4f} and {at_40[1]:.4f} above" in TEXT


def test_the_jumps_of_the_negative_control_are_the_ones_named() -> None:
    norms = {at: row["grad_norm"] for at, row in steps(of("350m")).items()}
    far = sorted((seed, step) for (_, seed, step), norm in norms.items() if norm > 1e3)
    assert far == [(1, 2), (2, 3), (3, 20), (3, 32)]
    for (seed, step), count in zip(far, (35, 49, 10, 6), strict=True):
        level = norms["broken", seed, step] / math.sqrt(count)
        bf16 = math.frexp(level)[0] * 2**8  # eight significant bits
        assert bf16 == pytest.approx(round(bf16), abs=1e-9)
    assert all(norm < 13.25 for norm in norms.values() if norm < 1e3)
    assert max(row["grad_norm"] for row in steps(of("1_3b")).values()) < 13.25
