"""experiments/finetune_wires_older: what its page says stands in its results and in its runs."""

from __future__ import annotations

import json
import re
from statistics import fmean

import pytest
import torch

from tests.experiments import published
from tests.experiments.published import (
    EXPERIMENTS,
    SEEDS,
    minus,
    runs,
    said_of_time,
    signed,
    spread,
    steps,
    summaries,
    sure,
)
from tests.experiments.scripts import ROOT, loaded
from zpp_lab.codecs.block import BlockCodec
from zpp_lab.models import build_model
from zpp_lab.study.holm import holm
from zpp_lab.study.stats import p_values, t_interval

HERE = EXPERIMENTS / "finetune_wires_older"
OLDER, YOUNG, FOUR_RANKS = "finetune_wires_older", "finetune_wires", "finetune_1b/350m"
TEXT = (HERE / "README.md").read_text()
REPORT = (HERE / "report.md").read_text()
BITS = ("g4", "zeropp", "w4", "w4_g84h", "w2")
ARMS = ("zero3", "zero3_reordered", *BITS)
LOOKS = (20, 40, 60)
COMMIT = "980bf9433b0c2392b281f6f6857a35b9a1886dd0"
SCRIPT = "experiments/finetune_wires_older/compare.py"


def gaps(arm: str, step: int = 60, folder: str = OLDER) -> list[float]:
    return published.gaps(folder, arm, step)


def training(arm: str, first: int, last: int, folder: str = OLDER) -> list[float]:
    return published.training(folder, arm, first, last)


def mean_loss(key: str, step: int, folder: str = OLDER, arm: str = "zero3") -> float:
    return fmean(steps(folder)[arm, seed, step][key] for seed in SEEDS)


@pytest.mark.parametrize("arm", [*ARMS, "broken"])
def test_the_table_follows_from_results(arm: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{arm}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    seeds, at = ([2] if arm == "broken" else SEEDS), steps(OLDER)
    assert cells[1] == f"{fmean(at[arm, seed, 60]['heldout_loss'] for seed in seeds):.4f}"
    own, whole = at[arm, 2, 1], at["zero3", 2, 1]
    all_, between = (
        sum(own[key] for key in keys) / sum(whole[key] for key in keys)
        for keys in (("bytes_intra", "bytes_inter"), ("bytes_inter",))
    )
    assert cells[4:6] == [f"{100 * s:.1f}%".replace(".0%", "%") for s in (all_, between)]
    verdict = next(line for line in REPORT.splitlines() if line.startswith(f"| {arm} |"))
    assert verdict.split("|")[3].strip() in cells[6]
    assert verdict.split("|")[4].strip() == cells[2]
    if p := re.search(r"p = ([\d.]+)", cells[6]):
        assert sure(OLDER, arm)[2] == p[1]
    assert (p is not None) == (arm in BITS)
    if arm in (*BITS, "zero3_reordered"):
        assert cells[3] == ", ".join(signed(gap, 5) for gap in gaps(arm))


def test_the_tables_are_those_of_their_commands() -> None:
    script = loaded(SCRIPT)
    older = script.Study(HERE)
    for folder, arms in ((YOUNG, ("g4", "zeropp", "w4", "w4_g84h")), (FOUR_RANKS, ("w2",))):
        young = script.Study(EXPERIMENTS / folder)
        for make in (script.gaps, script.along, script.errors):
            head, _, *rows = make(young, older).splitlines()
            assert head in TEXT
            told = [row for row in rows if row.split(" | ")[0].strip("| ") in arms]
            left_out = make is script.errors  # w4_g84h, whose two parts are in the table
            assert all(row in TEXT for row in told if not (left_out and "w4_g84h" in row))
            assert told
    windows = loaded("experiments/windows.py")
    for arm, found in windows.gaps(HERE / "results.csv").items():
        parts = ((0, 1), (1, 5), (5, 20), (20, 40), (40, 60))
        assert f"| {arm} | {' | '.join(windows.spread(found, *p) for p in parts)} |" in TEXT


def test_the_script_agrees_with_results() -> None:
    script = loaded(SCRIPT)
    young, older = script.Study(EXPERIMENTS / YOUNG), script.Study(HERE)
    for arm in ("g4", "zeropp", "w4", "w4_g84h"):
        row = next(r for r in script.gaps(young, older).splitlines() if r.startswith(f"| {arm} |"))
        pair = [gaps(arm, folder=YOUNG), gaps(arm)]
        whole = [training(arm, 1, 60, YOUNG), training(arm, 1, 60)]
        expected = [spread(each) for each in (*pair, minus(pair[1], pair[0]))]
        assert [cell.strip() for cell in row.strip("|").split("|")][1:4] == expected
        expected = [spread(each) for each in (*whole, minus(whole[1], whole[0]))]
        assert [cell.strip() for cell in row.strip("|").split("|")][7:] == expected


def test_the_studies_differ_in_nothing_but_the_base() -> None:
    for arm in ("zero3", "w4", "zeropp"):
        pair = [runs(folder, "config.yaml")[f"{arm}/seed2"] for folder in (YOUNG, OLDER)]
        lines = [{line.strip() for line in text.splitlines()} for text in pair]
        named = {line.split(":")[0] for line in lines[0] ^ lines[1]}
        assert named == {"start", "dir", "study"}
        data = [summaries(folder)[f"{arm}/seed2"]["data"]["hash"] for folder in (YOUNG, OLDER)]
        assert data[0] == data[1]
        held = [
            json.loads(runs(folder, "heldout.json")[f"{arm}/seed2"]) for folder in (YOUNG, OLDER)
        ]
        assert held[0]["hash"] == held[1]["hash"]
    pair = [runs(folder, "config.yaml")["prepare/base"] for folder in (YOUNG, OLDER)]
    lines = [{line.strip() for line in text.splitlines()} for text in pair]
    named = {line.split(":")[0] for line in lines[0] ^ lines[1]}
    seen = {"nodes", "gpus_per_node", "batch_size", "name", "compile", "steps", "lr"}
    files = {"eval_every", "checkpoint_every", "dir", "study"}
    assert named == seen | files | {"warmup_steps"}


def test_all_runs_name_their_commit_machine_and_torch() -> None:
    assert len(summaries(OLDER)) == 23
    for name, summary in summaries(OLDER).items():
        assert summary["commit"] == COMMIT, name
        assert summary["versions"]["torch"] == "2.11.0"
        assert set(summary["machine"]["gpus"]) == {"NVIDIA H200"}
        assert summary["outcome"] == "finished"
    assert f"commit {COMMIT[:7]}" in TEXT
    base, young = (summaries(folder)["prepare/base"] for folder in (OLDER, YOUNG))
    assert base["tokens"] == 8 * young["tokens"]
    per = [each["tokens"] / each["model_parameters"] for each in (base, young)]
    assert f"{per[0]:.2f} bytes a parameter (the other {per[1]:.3f})" in TEXT
    said = f"is {base['heldout_loss']:.4f} nats a byte (perplexity {base['perplexity']:.3f}) in"
    assert f"{said} place of {young['heldout_loss']:.4f}" in TEXT
    assert f"{base['peak_gib'][0]:.2f} GiB of tensors on each" in TEXT
    peaks = [
        each["peak_gib"][0] for name, each in summaries(OLDER).items() if name != "prepare/base"
    ]
    assert f"{min(peaks):.1f} to {max(peaks):.1f} on the one GPU" in TEXT
    assert said_of_time(OLDER) in TEXT
    last = runs(OLDER, "log.txt")["prepare/base"].strip().splitlines()[-1]
    assert "336.5k tok/s" in last
    assert "336.5k tokens/s" in TEXT


def test_the_bases_are_what_the_page_says() -> None:
    def of(folder: str, key: str) -> str:
        text = runs(folder, "config.yaml")["prepare/base"].split("\ntrain:\n")[1]
        found = re.search(rf"^  {key}: (.*)$", text, re.M)
        assert found is not None
        return found[1]

    both = {key: [of(f, key) for f in (OLDER, YOUNG)] for key in ("steps", "warmup_steps", "lr")}
    assert "{} steps for {}".format(*both["steps"]) in TEXT
    assert [float(rate) for rate in both["lr"]] == [5e-4, 2.5e-4]
    assert "a rate of 5e-4 for 2.5e-4" in TEXT
    assert "and {} steps of warm-up for {},".format(*both["warmup_steps"]) in TEXT
    read = [summaries(f)["prepare/base"]["tokens"] for f in (OLDER, YOUNG)]
    batches = [n // int(k) for n, k in zip(read, both["steps"], strict=True)]
    assert "batches of {:,} bytes for {:,}".format(*batches) in TEXT
    assert f"has read {read[0] / 1e6:.1f}M bytes" in TEXT
    assert f"in place of {read[1] / 1e6:.1f}M, and its loss" in TEXT


def test_what_the_list_says_of_the_arms_stands_in_the_table() -> None:
    said = [f"{fmean(gaps(arm, folder=f)):.4f}" for arm in ("g4", "zeropp") for f in (OLDER, YOUNG)]
    assert "`g4` {} for {}, `zeropp` {} for {}.".format(*said) in TEXT
    sent = {arm: steps(OLDER)[arm, 1, 1]["bytes_inter"] for arm in ("zeropp", "w4_g84h", "zero3")}
    share = [f"{100 * sent[arm] / sent['zero3']:.0f}" for arm in ("zeropp", "w4_g84h")]
    assert (
        "with {} % of the bytes between nodes, and `w4_g84h` there, with {} %".format(*share)
        in TEXT
    )
    margin = 0.0025 * mean_loss("heldout_loss", 60)
    assert f"On par within ±{margin:.4f} (0.25 %)" in TEXT
    assert f"0.25 % of the loss, is {margin:.4f} nats here" in TEXT
    low, high = t_interval(gaps("w4"), 0.95)
    known = f"{(high - low) / 2:.4f}"
    assert f"(p = {sure(OLDER, 'w4')[2]}), by how much to ±{known} only" in TEXT
    assert f"(its gap is known to ±{known})" in TEXT


def test_what_is_said_of_shares_and_steps_follows() -> None:
    def share(arm: str, folder: str) -> float:
        return 100 * fmean(gaps(arm, folder=folder)) / mean_loss("heldout_loss", 60, folder)

    said = {arm: [share(arm, folder) for folder in (YOUNG, OLDER)] for arm in BITS[:4]}
    assert {f"{each:.2f}" for each in said["g4"]} == {"0.07"}
    assert [f"{each:.2f}" for each in said["zeropp"]] == ["0.15", "0.16"]
    assert "0.07 % and on both of two hops 0.15 and 0.16" in TEXT
    assert "{:.2f} % from the young one and {:.2f} from this".format(*said["w4"]) in TEXT
    held = [[mean_loss("heldout_loss", at, folder) for at in LOOKS] for folder in (YOUNG, OLDER)]
    pace = [(each[1] - each[2]) / 20 for each in held]
    assert f"by {pace[1]:.4f} nats a step (there {pace[0]:.4f})" in TEXT
    late = {
        arm: [fmean(gaps(arm, folder=f)) / p for f, p in zip((YOUNG, OLDER), pace, strict=True)]
        for arm in ("g4", "zeropp", "w4")
    }
    own = f"`g4` is {late['g4'][1]:.1f} steps late and `zeropp` {late['zeropp'][1]:.1f}"
    there = f"({late['g4'][0]:.1f} and {late['zeropp'][0]:.1f} there)"
    assert f"{own} {there}, `w4` {late['w4'][1]:.1f} ({late['w4'][0]:.1f} there)" in TEXT


def test_how_sure_that_is_follows() -> None:
    apart = minus(gaps("w4"), gaps("w4", folder=YOUNG))
    p = p_values(apart, 1.0)[0]
    assert p is not None
    assert f"{spread(apart)} nats (p = {p:.2f}), paired by seed" in TEXT
    whole = training("w4", 1, 60)
    same = spread(minus(whole, training("w4", 1, 60, YOUNG)))
    other = spread(minus(whole, training("w4", 1, 60, FOUR_RANKS)))
    assert f"over all 60 steps {same} on the same batches, and {other} against" in TEXT
    means = {signed(fmean(gaps("w4", folder=folder)), 4) for folder in (YOUNG, FOUR_RANKS)}
    assert means == {"+0.0003"}
    for arm in ("g4", "zeropp"):
        less = minus(gaps(arm), gaps(arm, folder=YOUNG))
        assert t_interval(less, 0.95)[1] < 0
        less = minus(training(arm, 1, 60), training(arm, 1, 60, YOUNG))
        assert t_interval(less, 0.95)[1] < 0
    margin = 0.0025 * mean_loss("heldout_loss", 60, YOUNG)
    assert f"±{margin:.4f} neither" in TEXT
    within = holm({arm: p_values(gaps(arm), margin)[1] for arm in BITS})
    assert [f"{within[arm]:.2f}" for arm in ("w4", "w4_g84h")] == ["0.07", "0.07"]
    assert max(fmean(gaps(arm)) for arm in ("w4", "w4_g84h")) < margin
    more = sorted(minus(gaps("w4_g84h"), gaps("w4")))
    assert f"{more[0]:.4f} to {more[-1]:.4f} above `w4` in each seed" in TEXT
    assert max(more) < min(gaps("g4"))
    assert "Use zeropp " in REPORT
    assert "Use w4_g84h " in (EXPERIMENTS / YOUNG / "report.md").read_text()


def test_what_is_said_of_files_follows() -> None:
    def worse(arm: str, folder: str) -> int:
        found = {name: json.loads(text) for name, text in runs(folder, "heldout.json").items()}
        pairs = [(found[f"{arm}/seed{s}"], found[f"zero3/seed{s}"]) for s in SEEDS]
        each = [minus(own["nats"], base["nats"]) for own, base in pairs]
        return sum(fmean(gap) > 0 for gap in zip(*each, strict=True))

    older, young = (
        [worse(arm, folder) for arm in ("w4", "g4", "zeropp")] for folder in (OLDER, YOUNG)
    )
    assert f"in {older[0]} of 179 (mean over seeds; {young[0]} from the young base)" in TEXT
    assert f"`g4` in {older[1]} and `zeropp` in {older[2]} ({young[1]} and {young[2]})" in TEXT
    for arm in BITS:
        assert sure(OLDER, arm)[7].startswith("+0."), arm
    assert sure(OLDER, "zero3_reordered")[7] == "0.0000 to 0.0000"
    assert sure(OLDER, "broken")[7] == "–"


@pytest.mark.parametrize(("bits", "young", "said"), [(4, YOUNG, "0.0159"), (2, FOUR_RANKS, "0.65")])
def test_weights_are_rounded_as_random_normal_numbers_are(bits: int, young: str, said: str) -> None:
    codec = BlockCodec(bits=bits, block_size=256)
    x = torch.randn(1, 2**23, generator=torch.Generator().manual_seed(0))
    out = torch.empty(1, codec.nbytes(x.shape[1]), dtype=torch.uint8)
    codec.encode(x, None, out)
    error = float((codec.decode(out, x.shape[1]) - x).square().sum() / x.square().sum())
    for folder in (OLDER, young):
        lines = runs(folder, "metrics.jsonl")[f"w{bits}/seed1"].splitlines()
        told = [row["telemetry"] for row in map(json.loads, lines) if "telemetry" in row]
        for kind in ("attention", "mlp"):
            found = fmean(one["weights_forward"][kind]["nmse"] for one in told)
            assert found == pytest.approx(error, rel=5e-3)
            assert f"{found:.{len(said) - 2}f}" == said
    assert f"{said} of the weights' sum" in TEXT or f"2 bits {said};" in TEXT


def test_what_is_said_of_classes_follows() -> None:
    def nmse(folder: str, arm: str, wire: str, kind: str) -> float:
        texts = [runs(folder, "metrics.jsonl")[f"{arm}/seed{seed}"] for seed in SEEDS]
        rows = [json.loads(line) for text in texts for line in text.splitlines()]
        return fmean(row["telemetry"][wire][kind]["nmse"] for row in rows if "telemetry" in row)

    head = [nmse(folder, "w4", "weights_forward", "head") for folder in (OLDER, YOUNG)]
    assert "({:.4f} for {:.4f})".format(*head) in TEXT
    mlp = [nmse(folder, "g4", "grads_intra", "mlp") for folder in (OLDER, YOUNG)]
    assert "less in the MLPs ({:.3f} for {:.3f})".format(*mlp) in TEXT
    for folder in (OLDER, YOUNG):
        assert f"{nmse(folder, 'g4', 'grads_intra', 'attention'):.3f}" == "0.019"
    assert "the same in attention (0.019)" in TEXT
    columns, layers = 1024, 24
    every = summaries(OLDER)["prepare/base"]["model_parameters"]
    inside = every - 2 * 256 * columns - (2 * layers + 1) * columns  # embed and head; norms
    assert f"MLPs, {100 * inside / every:.1f} % of the parameters" in TEXT
    assert f"in the head, {100 * 256 * columns / every:.2f} % of the parameters" in TEXT


def test_which_bytes_the_first_weights_lose() -> None:
    config = loaded("experiments/finetune_1b/vanished.py").of_arm(OLDER, "broken")
    model = build_model(config.model, 256, "meta")
    assert model.get_parameter("head.weight").shape == (256, 1024)
    first = model.start(config.seed).rows("embed.weight", 0, 256).float().abs().amax(1)
    below = first.view(-1, 8).amax(1).repeat_interleave(8) / 2 - first
    assert (below > 0).nonzero().flatten().tolist() == [ord("}")]
    assert f"is {float(below.max()):.3f} below half of its block's" in TEXT
    lines = runs(OLDER, "metrics.jsonl")["prepare/base"].splitlines()
    rates = sum(json.loads(line)["lr"] for line in lines)
    assert f"the base's rates add up to {rates:.2f})" in TEXT


def test_what_rounding_costs_at_once_and_what_is_left_follows() -> None:
    first = {f: fmean(training("w4", 1, 1, f)) for f in (OLDER, YOUNG)}
    loss = {f: mean_loss("loss", 1, f) for f in (OLDER, YOUNG)}
    own = f"`w4` loses {first[OLDER]:.4f} on average, from the young base {first[YOUNG]:.4f}"
    assert own in TEXT
    shares = [100 * first[f] / loss[f] for f in (OLDER, YOUNG)]
    said = f"then, {loss[OLDER]:.3f} and {loss[YOUNG]:.3f}, they are"
    assert f"{said} {shares[0]:.2f} and {shares[1]:.2f} %" in TEXT
    parts = ((6, 20), (21, 40), (41, 60))
    young, older = ([training("w4", *part, f) for part in parts] for f in (YOUNG, OLDER))
    means = [fmean(each) for each in young]
    said = "{:.4f} on average, and {:.4f} and {:.4f} later".format(*means)
    more = spread(minus(older[0], young[0])).lstrip("+")
    means = [fmean(each) for each in older]
    assert f"{said}; here it is {means[0]:.4f}, which is {more} more" in TEXT
    assert f"it stays: {means[1]:.4f} in steps 21 to 40, {means[2]:.4f} after" in TEXT
    left = [100 * fmean(gaps("w4", folder=f)) / first[f] for f in (OLDER, YOUNG)]
    assert f"it is {left[0]:.0f} % of what step 1 cost, there {left[1]:.0f} %" in TEXT


def test_what_is_said_of_two_bits_follows() -> None:
    first = [fmean(training("w2", 1, 1, f)) for f in (OLDER, FOUR_RANKS)]
    end = [fmean(gaps("w2", folder=f)) for f in (OLDER, FOUR_RANKS)]
    assert f"{first[0]:.3f} for {first[1]:.3f}" in TEXT
    back = [100 * (1 - b / a) for a, b in zip(first, end, strict=True)]
    assert f"{back[0]:.0f} % for {back[1]:.0f}" in TEXT
    assert f"2 bits end {end[0]:.3f} nats above" in TEXT
    assert f"they ended {end[1]:.3f} (" in TEXT
    w2, at_20 = mean_loss("heldout_loss", 60, arm="w2"), mean_loss("heldout_loss", 20)
    assert f"end ({w2:.3f}) above where plain ZeRO-3 was at step 20 ({at_20:.3f})" in TEXT
    start = [mean_loss("loss", 1, f) for f in (OLDER, FOUR_RANKS)]
    last = [mean_loss("heldout_loss", 60, f) for f in (OLDER, FOUR_RANKS)]
    share = [100 * e / (s - h) for e, s, h in zip(end, start, last, strict=True)]
    said = f"leave is {share[0]:.0f} % of what the finetuning gained, from step 1's loss of"
    assert f"{said} {start[0]:.3f} to {last[0]:.3f}" in TEXT
    assert f"from the young base it was {share[1]:.0f} %" in TEXT


def test_what_is_said_of_masters_and_gradients_follows() -> None:
    def masters(arm: str, folder: str, over: str) -> float:
        found = summaries(folder)
        own = [found[f"{arm}/seed{s}"]["heldout_loss_master"] for s in SEEDS]
        other = arm if over == "wire" else "zero3"
        return fmean(minus(own, [found[f"{other}/seed{s}"]["heldout_loss"] for s in SEEDS]))

    wire = [masters("w4", folder, "wire") for folder in (OLDER, YOUNG)]
    said = f"`w4` are {wire[0]:.4f} worse than what the wire brings of them, from the young base"
    assert f"{said} {wire[1]:.4f}" in TEXT
    two = [masters("w2", folder, "wire") for folder in (OLDER, FOUR_RANKS)]
    assert f"`w2`'s {two[0]:.2f} for {two[1]:.2f}" in TEXT
    plain = [masters("w4", folder, "zero3") for folder in (OLDER, YOUNG)]
    assert f"the masters of `w4` are {plain[0]:.4f} and {plain[1]:.4f} worse" in TEXT
    gained = [mean_loss("loss", 1, f) - mean_loss("heldout_loss", 60, f) for f in (YOUNG, OLDER)]
    assert f"({gained[0]:.3f} nats below step 1's loss, here {gained[1]:.3f})" in TEXT
    for arm in ("g4", "zeropp"):
        grew = [[fmean(gaps(arm, at, folder)) for at in LOOKS] for folder in (YOUNG, OLDER)]
        assert grew[0] == sorted(grew[0])
        assert grew[1][0] == pytest.approx(grew[1][2], rel=0.15)


def test_what_is_said_of_noise_and_of_the_divergence_follows() -> None:
    order = max(map(abs, gaps("zero3_reordered")))
    rows = [row for (arm, _, _), row in steps(OLDER).items() if arm == "zero3_reordered"]
    assert f"moves {order:.5f} held out at the end and 0.0003 in any step" in TEXT
    assert 2.5e-4 < max(abs(row["gap"]) for row in rows) < 3.5e-4
    assert not any(
        steps(OLDER)["zero3_reordered", s, i]["gap"] for s in SEEDS for i in range(1, 11)
    )
    at = steps(OLDER)
    reached = {
        s: max(step for arm, seed, step in at if (arm, seed) == ("broken", s)) for s in SEEDS
    }
    assert reached == {1: 48, 2: 60, 3: 30}
    for seed, rank in ((1, 4), (3, 9)):
        failed = json.loads(runs(OLDER, "failure.json")[f"broken/seed{seed}"])
        assert failed["step"] == reached[seed]
        assert f"embed.weight on rank {rank} is not finite before any wire" in failed["error"]
    assert "after steps 48 and 30" in TEXT
    young = steps(YOUNG)
    far = [
        (s, i) for (arm, s, i), row in young.items() if arm == "broken" and row["grad_norm"] > 99
    ]
    assert sorted(far)[:2] == [(1, 49), (3, 31)]  # the very next steps of those two seeds
    assert 2 not in {seed for seed, _ in far}
    norms = {key: row["grad_norm"] for key, row in at.items()}
    broken = max(norm for (arm, _, _), norm in norms.items() if arm == "broken")
    assert f"the arm's norm is {broken:.1f} at most" in TEXT
    pair = [norms[arm, 3, 31] for arm in ("w2", "zero3")]
    assert "`w2` has a norm of {:.2f}, where plain ZeRO-3 has {:.2f}".format(*pair) in TEXT
    late = [n for (arm, s, i), n in norms.items() if arm == "w2" and i > 21 and (s, i) != (3, 31)]
    assert 1.51 < max(late) < 1.525
    assert "after the 21st has one above 1.52" in TEXT
    assert max(n for (arm, _, _), n in norms.items() if arm not in ("w2", "broken")) < 1.24
    assert "w2 seed 3 step 31 (2.34 for 0.512)" in REPORT


def test_what_the_other_pages_say_follows() -> None:
    first = (ROOT / "experiments" / "README.md").read_text()
    line = next(row for row in first.splitlines() if "](finetune_wires_older)" in row)
    ends = [mean_loss("heldout_loss", 60, folder) for folder in (OLDER, YOUNG)]
    assert f"ends at {ends[0]:.2f} nats a byte for {ends[1]:.2f}" in line
    for arm in ("w4", "g4", "zeropp"):
        assert spread(gaps(arm)).lstrip("+") in line, arm
    assert f"2 bits by {fmean(gaps('w2')):.3f}" in line
    guide = (ROOT / "GUIDE.md").read_text()
    share = [
        100 * fmean(gaps("w4", folder=f)) / mean_loss("heldout_loss", 60, f) for f in (OLDER, YOUNG)
    ]
    assert f"by {share[0]:.2f} % of the loss for {share[1]:.2f}" in guide
