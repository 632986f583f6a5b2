"""What finetune_weights and finetune_wires_older both ran, in two calls, is equal to the bit."""

from __future__ import annotations

import csv
import io
import json

from tests.experiments.published import EXPERIMENTS, rows, runs, said_of_time, summaries
from tests.experiments.scripts import loaded

HERE, BEFORE = "finetune_weights", "finetune_wires_older"
TEXT = (EXPERIMENTS / HERE / "README.md").read_text()
COMMITS = {
    HERE: "e7ab9bf84a7fd16837bd85c0e30be5461cac0509",
    BEFORE: "980bf9433b0c2392b281f6f6857a35b9a1886dd0",
}
AT_BOTH = ("zero3", "zero3_reordered", "broken", "w4", "w2")
TIMES = ("study", "seconds", "tokens_per_s")


def test_all_runs_name_their_commit_machine_and_torch() -> None:
    assert len(summaries(HERE)) == 47  # of 49: broken diverged in two
    for folder, commit in COMMITS.items():
        for name, summary in summaries(folder).items():
            assert summary["commit"] == commit, name
            assert summary["versions"]["torch"] == "2.11.0"
        assert f"{commit[:7]}" in TEXT
    kinds = [summaries(folder)["w4/seed1"]["machine"] for folder in COMMITS]
    assert kinds[0] == kinds[1]
    base = summaries(HERE)["prepare/base"]
    assert f"{base['tokens'] / 1e6:.1f}M bytes of Python read" in TEXT
    assert f"{base['heldout_loss']:.4f} nats a byte held out" in TEXT
    assert said_of_time(HERE) in TEXT


def test_what_both_studies_ran_is_equal_in_every_digit() -> None:
    here, before = rows(HERE), rows(BEFORE)
    both = here.keys() & before.keys()
    assert {arm for arm, _, _ in both} == set(AT_BOTH)
    assert len(both) == 858 == sum(arm in AT_BOTH for arm, _, _ in here)
    for at in both:
        pair = [{k: v for k, v in one[at].items() if k not in TIMES} for one in (here, before)]
        assert pair[0] == pair[1], at
    looks = sum(bool(here[at]["heldout_loss"]) for at in both)
    assert "**All 858 rows (arm, seed, step) that both have are equal in every digit:**" in TEXT
    assert f"training loss, {looks} held-out losses, gradient norm, gap and bytes" in TEXT
    columns = next(iter(csv.reader(io.StringIO((EXPERIMENTS / HERE / "results.csv").read_text()))))
    kept = [columns[i - 1] for i in (*range(2, 10), 11, *range(13, len(columns) + 1))]
    assert f"With the header {len(both) + 1} lines" in TEXT
    assert set(columns) - set(kept) == set(TIMES)  # what the page's `cut` leaves out


def test_the_base_and_the_runs_folders_are_equal_too() -> None:
    same = loaded("experiments/same_run.py")
    names = [name for name in summaries(BEFORE) if name.split("/")[0] in (*AT_BOTH, "prepare")]
    assert len(names) == 14
    assert "equal in each of its 600 steps, and the 13 finished runs in what their folders" in TEXT
    for name in names:
        told = [runs(folder, "metrics.jsonl")[name].splitlines() for folder in COMMITS]
        kept = [
            [{k: v for k, v in json.loads(x).items() if k not in same.TIMES} for x in lines]
            for lines in told
        ]
        assert kept[0] == kept[1], name
        assert len({runs(folder, "heldout.json")[name] for folder in COMMITS}) == 1
        ends = [{k: summaries(f)[name][k] for k in same.RESULTS} for f in COMMITS]
        assert ends[0] == ends[1]
    assert len(runs(HERE, "metrics.jsonl")["prepare/base"].splitlines()) == 600


def test_the_negative_control_diverged_after_the_same_steps() -> None:
    for folder in COMMITS:
        reached = {seed: step for arm, seed, step in rows(folder) if arm == "broken"}
        assert (reached[1], reached[3]) == (48, 30)
        assert set(runs(folder, "failure.json")) == {"broken/seed1", "broken/seed3"}
    assert "diverged in seeds 1 and 3 after the same steps, 48 and 30" in TEXT
