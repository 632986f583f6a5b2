"""The reference study's queue: what a call leaves behind."""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
import yaml

from tests.experiments.scripts import loaded
from tests.small_runs import small
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.flat import stored_config
from zpp_lab.config.schema import Config, RunConfig
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.documents import Documents, Reader
from zpp_lab.study.judge.verdict import StudyResult, judge_study
from zpp_lab.study.run.places import Slot
from zpp_lab.study.run.plan import PlannedRun, write_config
from zpp_lab.study.run.queue import Ended
from zpp_lab.train.time_slice import PAUSED
from zpp_lab.train.trainer import run as train

ROOT = Path(__file__).parents[2]
fill = loaded("experiments/reference/fill.py")
corpus = loaded("experiments/reference/corpus.py")
# as its page says
FITTED = (
    *(f"reference_{size}" for size in ("10m", "3m", "10m_12m", "30m", "134m", "368m")),
    *("reference_10m_more/zeropp_hadamard", "reference_10m_6000"),
)


def test_a_text_is_unpacked_only_if_it_is_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "PINNED", tmp_path / "corpus.sha256")
    (tmp_path / "corpus.sha256").write_text("ab  other.tar\n")
    files = {"a/b.txt": b"one", "c.txt": b"two"}
    text = corpus.Text("tiny", tmp_path / "text", "t.json", 20, lambda: files)
    assert corpus.make(text, tmp_path) == 0  # pins it
    assert corpus.unpack(text, tmp_path) == 0
    assert {name: (tmp_path / "text" / name).read_bytes() for name in files} == files
    files["c.txt"] = b"three"
    assert corpus.make(text, tmp_path) == 1
    (tmp_path / "text.sha256").unlink()
    (tmp_path / "tiny.tar.xz").write_bytes(lzma.compress(corpus.archive(files), preset=0))
    assert corpus.unpack(text, tmp_path) == 1
    assert "another corpus" in capsys.readouterr().err
    assert (tmp_path / "text" / "c.txt").read_bytes() == b"two"


def test_a_run_that_another_study_has_is_lent_under_its_own_name(tmp_path: Path) -> None:
    def planned(study: str, seed: int = 1) -> PlannedRun:
        folder = tmp_path / study
        own = RunConfig(dir=str(folder), study=study, arm=f"{study} arm")
        return PlannedRun(f"{study} arm", seed, folder, Config(seed=seed, run=own))

    there, absent = planned("old"), planned("new")
    assert fill.alike(there) == fill.alike(absent) != fill.alike(planned("new", 2))
    there.dir.mkdir()
    (there.dir / "summary.json").write_text(json.dumps({"study": "old", "arm": "old arm", "n": 3}))
    write_config(there)
    (there.dir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    fill.lend(there, absent)
    assert json.loads((absent.dir / "summary.json").read_text()) == {
        "study": "new",
        "arm": "new arm",
        "n": 3,
    }
    assert stored_config(yaml.safe_load((absent.dir / "config.yaml").read_text())) == absent.config
    metrics = [run.dir / "metrics.jsonl" for run in (there, absent)]
    assert metrics[0].read_text() == metrics[1].read_text()


def test_a_run_begins_if_it_ends_in_time_and_makes_no_other_late() -> None:
    pace = fill.Pace(start=5.0, shared=10.0)  # seconds of a GPU that at least 3.1 runs share
    assert pace.ends([1.0, 0.5]) == pytest.approx([31.0, 15.5])
    assert pace.fits([], 1.0, 36.5)
    assert not pace.fits([], 1.0, 35.5)
    assert pace.fits([9.0], 1.0, 40.0), "one that is late anyway holds up no other"
    assert not pace.fits([2.0] * 3, 1.0, 60.0), "those that are late by a little do"
    assert pace.fits([2.0], 1.0, 60.0), "but for what takes nothing from them"
    assert pace.ends([1.0, 1.0, 1.0]) == pytest.approx([31.0] * 3)
    assert pace.ends([1.0, 1.0, 1.0, 0.5])[0] == pytest.approx(35.5)
    assert pace.fits([1.0, 1.0, 1.0], 0.5, 36.0)
    assert not pace.fits([1.0, 1.0, 1.0], 0.5, 35.0)


def test_arms_that_are_not_decided_are_planned_with_their_next_seeds(tmp_path: Path) -> None:
    """By kept runs: 2 bits without a memory are decided after the first look, 4 bits are not."""
    with tarfile.open(ROOT / "experiments" / "reference" / "memories.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    study = load_study("memories", {}, ["ops.backend=cuda"])
    names = ("zero3", "g4_forgotten", "g2_forgotten")
    few = replace(study, arms=[arm for arm in study.arms if arm.name in names], max_seeds=8)
    seeds: dict[str, list[int]] = {}
    for run in fill.plan_of(few, tmp_path):
        seeds.setdefault(run.arm, []).append(run.seed)
    more = list(range(1, 9))
    assert seeds == {"zero3": more, "g4_forgotten": more, "g2_forgotten": more[:4]}


def test_all_that_runs_beside_ends_with_the_queue(tmp_path: Path) -> None:
    beside = fill.Beside(f"sleep 60 & echo $! > {tmp_path}/child; wait", tmp_path / "log")
    beside.look(beside.began + fill.AFTER - 1)
    assert beside.process is None
    assert beside.running, "it is still to begin"
    beside.look(beside.began + fill.AFTER + 1)
    child = tmp_path / "child"
    until(lambda: child.exists() and child.read_text().strip() != "")
    beside.stop()
    beside.process.wait()
    assert not beside.running
    words = Path(f"/proc/{child.read_text().strip()}/cmdline")  # empty until it is reaped
    until(lambda: not words.exists() or not words.read_bytes())


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_fails_at_its_start_is_begun_once_more(tmp_path: Path) -> None:
    """MPS may refuse one of many that come together; a second refusal is a failure."""
    folder = tmp_path / "study" / "arm" / "seed1"
    run = PlannedRun("arm", 1, folder, Config(run=RunConfig(dir=str(folder), study="study")))
    folder.mkdir(parents=True)
    (folder / "failure.json").write_text(json.dumps({"outcome": "crashed", "error": "busy"}))
    queue = fill.Queue(tmp_path, tmp_path, [fill.Gpu("0")], 1, time.time() + 60, False)
    for again, failed in (([run], 0), ([], 1)):
        queue.gpus[0].runs[folder] = fill.Running(run, 0.0, 0)
        assert queue.settle(Ended(run, Slot(1, "0"), 1)) == again
        assert queue.failed == failed


def test_a_run_that_stops_for_the_next_call_goes_on_there(tmp_path: Path) -> None:
    """One that MPS refuses there is begun once more, from its checkpoint. One that was cut without
    a checkpoint starts anew."""
    folder = tmp_path / "study" / "arm" / "seed1"
    config = small(tmp_path, "run.piece_steps=4", f"run.dir={folder}", "run.study=study")
    run, slot = PlannedRun("arm", 1, folder, config), Slot(1, "0")
    assert train(config)["outcome"] == "unfinished"

    def call() -> Any:
        queue = fill.Queue(tmp_path, tmp_path, [fill.Gpu("0")], 1, time.time() + 90, True)
        queue.pool.start = lambda *_: None
        fill.clean(run)
        assert queue.start([run], time.time()) == []
        return queue

    queue = call()
    assert queue.gpus[0].left() == [pytest.approx(8 / 12 + fill.ENDING)]
    assert not queue.useful
    (folder / "failure.json").write_text(json.dumps({"outcome": "crashed", "error": "busy"}))
    assert queue.settle(Ended(run, slot, 1)) == [run]
    assert train(config)["step"] == 8
    assert queue.start([run], time.time()) == []
    assert queue.settle(Ended(run, slot, PAUSED)) == []
    assert (queue.paused, queue.failed, queue.finished, queue.useful) == (1, 0, [], True)
    shutil.rmtree(folder / "checkpoints")
    assert call().gpus[0].left() == [pytest.approx(1 + fill.ENDING)]
    reserve = fill.Pace().start + fill.SPARE - fill.STOP + fill.PAUSE + fill.Size().gb
    for seconds, waits in ((reserve + 5, []), (reserve - 5, [run])):  # for a run that would stop
        until = time.time() + seconds
        queue = fill.Queue(tmp_path, tmp_path, [fill.Gpu("0")], 1, until, True)
        queue.pool.start = lambda *_: None
        assert queue.start([run], time.time()) == waits


def test_runs_that_go_on_write_their_checkpoints_one_after_another(tmp_path: Path) -> None:
    config = Config(run=RunConfig(study="reference_134m"))
    runs = [PlannedRun("zero3", n, tmp_path / f"seed{n}", config) for n in (1, 2, 3)]
    end, stops = time.time() + 500, []
    queue = fill.Queue(tmp_path, tmp_path, [fill.Gpu("0"), fill.Gpu("1")], 2, end, True)
    queue.pool.start = lambda run, _: stops.append(run.config.run.until)
    assert queue.start(list(runs), time.time()) == []
    each = fill.SIZES["reference_134m"].gb
    assert stops == pytest.approx([end - fill.PAUSE - i * each for i in range(3)])


def test_slow_runs_share_a_gpu_with_each_other_alone_where_there_are_two(tmp_path: Path) -> None:
    gpus = [fill.Gpu("0", apart=True), fill.Gpu("1", apart=True)]
    queue = fill.Queue(tmp_path, tmp_path, gpus, 2, time.time() + 120, True)
    queue.pool.start = lambda *_: None
    arms = ["sham_w4", "tagc_topk", "zero3", "topk_ef", "zeropp", "qsdp"]
    runs = [PlannedRun(arm, 1, tmp_path / arm, Config()) for arm in arms]
    assert [run.arm for run in queue.start(list(runs), time.time())] == ["topk_ef", "qsdp"]
    shared = [{one.run.arm for one in gpu.runs.values()} for gpu in gpus]
    assert shared == [{"sham_w4", "tagc_topk"}, {"zero3", "zeropp"}]
    gpus = [fill.Gpu(name, apart=True) for name in "01"]
    queue = fill.Queue(tmp_path, tmp_path, gpus, 8, time.time() + 120, True)
    queue.pool.start = lambda *_: None
    seeds = [PlannedRun("topk_ef", n, tmp_path / f"topk{n}", Config()) for n in range(6)]
    assert queue.start(seeds, time.time()) == []
    assert [len(gpu.runs) for gpu in gpus] == [fill.ABREAST, 2]
    queue = fill.Queue(tmp_path, tmp_path, [fill.Gpu("0", apart=True)], 2, time.time() + 120, True)
    queue.pool.start = lambda *_: None
    slow = runs[0]
    assert queue.start(runs[2:3], time.time()) == []
    assert queue.start([slow, runs[4]], time.time()) == [slow, runs[4]]  # its place is kept


def test_predictions_are_counted_with_and_without_the_measured_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded("experiments/reference/law.py")
    told = {"gap": 0.010, "low": 0.008, "high": 0.012, "beyond": [], "commit": ""}
    measured = {"inside": (0.011, 1e-4), "by_error": (0.013, 2e-3), "outside": (0.013, 1e-4)}
    cells = [
        script.law.Cell(f"reference_10m/{name}", script.law.Errors(0.1, 0.0), 1e7, 5e7, 1500, *gap)
        for name, gap in measured.items()
    ]
    known = tmp_path / "predicted.json"
    known.write_text(json.dumps({cell.name: told for cell in cells}))
    monkeypatch.setattr(script, "PREDICTED", known)
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "measured", lambda _: cells)
    seeds = {"inside": [0.011, 0.0112], "by_error": [0.0, 0.026], "outside": [0.013, 0.0131]}
    monkeypatch.setattr(script, "kept_gaps", lambda _: seeds)
    script.compare()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if "OUTSIDE" in line] == ["reference_10m/outside"]
    assert "2 of 3 inside" in said[-1]
    assert "1 without that" in said[-1]
    assert "<svg" in (tmp_path / "predicted.svg").read_text()
    hits = [script.Hit(cell, told, seeds[cell.name.split("/")[1]]) for cell in cells]
    prose = script.Hit(replace(cells[0], name="reference_10m_prose/w4"), told, [0.1, 0.11])
    longer = script.Hit(replace(cells[0], tokens=2e8), told, [0.1, 0.11])
    near, far, other, every = script.by_split([*hits, prose, longer]).values()
    assert (near, far) == ([hits[1]], [hits[0], hits[2]]), "zero lies inside by_error's interval"
    assert (other, len(every)) == ([prose, longer], 5)


def test_a_prediction_of_zero_is_right_where_the_gap_is_no_larger_than_its_error() -> None:
    script = loaded("experiments/reference/law.py")
    told = {"gap": 0.002, "low": 0.001, "high": 0.003}

    def hit(gap: float, error: float) -> Any:
        cell = script.law.Cell(
            "reference_10m/w8", script.law.Errors(0.1, 0.0), 1e7, 5e7, 1500, gap, error
        )
        return script.Hit(cell, told, [gap - error, gap + error])

    assert hit(0.0004, 1e-5).zero, "the order of sums alone moves as much"
    assert hit(0.0015, 1e-3).zero
    assert not hit(0.0025, 1e-3).zero


@pytest.mark.parametrize("arm", ["diff3_g83", "diff3_g83_ef", "diff2_g83", "diff2_g83_ef"])
def test_arms_of_few_bits_send_at_most_3_2_bits_an_element_between_nodes(arm: str) -> None:
    study = load_study("reference_10m_more")
    own = next(one for one in study.arms if one.name == arm)
    config = compose([*study.overrides, *own.overrides])
    model = build_model(config.model, 4096, "meta")
    plan = build_plan(model, config)
    elements = sum(p.numel() for p in model.parameters())
    bits = {wire: 8 * sent.inter / elements for wire, sent in plan.step_bytes().items()}
    assert max(bits.values()) <= 3.2, "scales and exempt parameters included"
    assert bits["grads_inter"] > 3
    assert bits["weights_forward"] == bits["weights_backward"] == 0, "nodes keep weights"
    remembered = {wire for wire, _ in plan.memories}
    assert remembered == ({"grads_inter"} if arm.endswith("_ef") else set())


@pytest.mark.slow
def test_the_published_law_is_what_the_kept_runs_give() -> None:
    script = loaded("experiments/reference/law.py")
    found = script.fit(script.cells_of(FITTED))
    known = script.law.load_law()
    assert found.cells == known.cells
    assert found.ranges.keys() == known.ranges.keys()
    pairs = [(found.ranges[name], known.ranges[name]) for name in known.ranges]
    pairs += [(found.values, known.values), (found.covariance, known.covariance)]
    for one, other in [*pairs, (found.misfit, known.misfit)]:
        assert np.allclose(one, other, rtol=1e-5, atol=0)  # last digits differ between processors


@pytest.mark.slow
def test_the_page_says_what_more_tokens_do_to_the_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded("experiments/reference/law.py")
    page = tmp_path / "page.md"
    page.write_text(script.PAGE.read_text())
    monkeypatch.setattr(script, "PAGE", page)
    script.tokens(["reference_10m", "reference_10m_prose", "reference_10m_200m"])
    assert page.read_text() == (script.HERE / "LOSS.md").read_text()


def judged(loss: float, **gaps: list[float]) -> StudyResult:
    """A study of these arms with eight seeds, whose gaps to the baseline are those."""
    seeds = range(1, 9)
    base = [loss + 0.01 * (s % 3) for s in seeds]
    losses = {"zero3": base}
    losses |= {arm: [b + g for b, g in zip(base, own, strict=True)] for arm, own in gaps.items()}
    arms = [ArmConfig(arm, role="arm" if arm in gaps else "baseline") for arm in losses]
    runs = [
        Run(Path(arm), arm, s, {}, {"heldout_loss": v, "bytes": {}})
        for arm, own in losses.items()
        for s, v in zip(seeds, own, strict=True)
    ]
    return judge_study(StudyConfig("s", "?", arms, list(seeds)), runs)


def test_gaps_by_steps_are_paired_and_their_exponent_is_that_of_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = loaded("experiments/reference/law.py")
    noise = [0.0001 * (s % 3 - 1) for s in range(8)]
    grows, stays = [0.01 + n for n in noise], [0.002 - n for n in noise]
    found = {
        "few": judged(2.0, zeropp=grows, rotated=stays, alone=stays),
        "many": judged(2.0, zeropp=[2 * g for g in grows], rotated=stays),
    }
    monkeypatch.setattr(script, "kept", found.get)
    monkeypatch.setattr(script, "steps_of", {"few": 1500, "many": 6000}.get)
    lines = script.by_steps("few", "many", [["zeropp", "rotated"]]).split("\n")
    rows = {row[0]: row[1:] for line in lines[2:] if (row := line.strip("| ").split(" | "))}
    assert lines[0].startswith("| arm | 1,500 steps | 6,000 steps |")
    assert list(rows) == ["zeropp", "rotated", "zeropp less rotated"], "alone has run in one study"
    assert rows["zeropp"][3] == "+0.50 (+0.50 to +0.50)", "twice the gap in four times the steps"
    assert rows["rotated"][2].startswith("0.0000 ± 0.0000 (8)")
    assert rows["zeropp less rotated"][1].startswith("+0.018")
    some = script.by_steps("few", "many", [["zeropp", "rotated"]], range(4, 9)).split("\n")
    assert all(line.count(" (5)") == 3 for line in some[2:])
    assert script.exponent({1: 0.1, 2: -0.1, 3: 0.0}, {1: 0.2, 2: 0.2, 3: 0.2}, 4) == ""
    with pytest.raises(ValueError, match="none"):
        script.by_steps("few", "none")


def page_of(script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *heads: str) -> Path:
    """A page with a table for each head, which the script takes for its own."""
    page = folder / "page.md"
    page.write_text("# a page\n\n" + "".join(f"| {h} | old |\n| old |\n\n" for h in heads))
    monkeypatch.setattr(script, "PAGE", page)
    return page


def test_the_table_of_scatter_has_each_run_once_and_names_other_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded("experiments/reference/law.py")
    follows, strays = [[0.001 * s for s in range(1, 9)], [0.02, -0.02] * 4]
    found = {
        name: judged(loss, w8=follows, w4=strays)
        for name, loss in {"one": 2.0, "same": 2.0, "other": 3.0}.items()
    }
    monkeypatch.setattr(script, "kept", found.get)
    page = page_of(script, tmp_path, monkeypatch, script.SCATTER)
    script.scatter(["one", "same", "other"])
    rows = [line.split(" | ") for line in page.read_text().split("\n")[4:-2]]
    assert [row[0] for row in rows] == ["| w8", "| other/w8", "| w4", "| other/w4"]
    assert float(rows[0][1]) == pytest.approx(stdev(follows), abs=1e-5)
    assert int(rows[0][2].removesuffix(" %")) > 90
    assert int(rows[2][2].removesuffix(" %")) < 50
    with pytest.raises(ValueError, match="none has not run"):
        script.scatter(["none"])


def test_gaps_are_shown_by_bits_by_study_and_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded("experiments/reference/law.py")
    noise = [0.0001, -0.0001] * 4
    drawn = {arm: [0.5 + n for n in noise] for arm in script.BY_SIZE}
    found = {
        "one": judged(2.0, **drawn, g8_one_hop_plain=noise),
        "two": judged(3.0, g8_one_hop_plain=noise, w2_256_symmetric=noise),
        "longer": judged(3.0, w2_256_symmetric=noise),
    }
    extents = {"one": (1e7, 5e7, 1500), "two": (1e8, 5e7, 1500), "longer": (1e7, 2e8, 6000)}

    def measured(study: str) -> list[Any]:
        names = [arm.name for arm in found[study].arms if arm.gaps]
        errors = script.law.Errors(0.1, 0.0)
        return [script.law.Cell(f"{study}/{n}", errors, *extents[study], 0.5, 0.1) for n in names]

    monkeypatch.setattr(script, "kept", found.get)
    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(script, "load_study", lambda name: found[name].study)
    monkeypatch.setattr(script, "HERE", tmp_path)
    panels: list[Any] = []
    panel = script.panel
    monkeypatch.setattr(script, "panel", lambda *a: panels.append(a) or panel(*a))
    page = page_of(script, tmp_path, monkeypatch, script.WIRES, script.ARMS)
    script.gaps(["one", "two", "longer"])
    cells = [line[2:].split(" | ", 1) for line in page.read_text().split("\n")]
    rows = dict(row for row in cells if len(row) == 2)
    single = "+0.5000 ± 0.0001 (8), worse"
    assert rows["weights, blocks of 256"] == f" |  | {single} | {single} | {single} |"
    assert rows["gradients, one hop"] == f"0.0000 ± 0.0001 (8), on par |  |  |  | {single} |"
    assert "w4_256_symmetric" not in rows, "it is in the first table and ran in no other study"
    assert rows["zeropp"] == "+0.5000 ± 0.0001 (8) |  |  |"
    assert rows["g8_one_hop_plain"] == "0.0000 ± 0.0001 (8) | 0.0000 ± 0.0001 (8) |  |"
    (_, _, by_bits), (_, _, by_size) = panels
    assert [(p["name"], p["x"]) for p in dict(by_bits)["point"]][-2:] == [
        ("gradients, one hop", 8),
        ("gradients, one hop", 2),
    ]
    weights = [p["x"] for p in dict(by_size)["point"] if p["name"] == "2-bit weights"]
    assert weights == [10, 100], "a study with other tokens is not drawn"
    assert "8- and 4-bit gradients" in (tmp_path / "loss.svg").read_text()


def test_power_takes_what_has_run_and_draws_the_rest_by_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    power = loaded("experiments/reference/power.py")
    draw, tokens = np.random.default_rng(0), np.arange(500, 540)
    means = {"worse": 0.5 * tokens, "equal": 0.0 * tokens}
    arms = [ArmConfig("zero3", role="baseline"), *map(ArmConfig, means)]
    study = StudyConfig("s", "?", arms, [1, 2, 3, 4, 5])
    reader, runs = Reader(), []
    nats: dict[tuple[str, int], Any] = {}
    for arm in study.arms:
        for seed in study.seeds:
            noise = 1e-4 * tokens * draw.standard_normal(len(tokens))
            nats[arm.name, seed] = means[arm.name] + noise if arm.name in means else 0.0 * tokens
            own = 2.0 * tokens + nats[arm.name, seed]
            told = {"heldout_loss": own.sum() / tokens.sum(), "bytes": {}}
            runs.append(Run(Path(arm.name, str(seed)), arm.name, seed, {}, told))
            reader.know(runs[-1], Documents("", np.arange(len(tokens)), tokens, own))
    monkeypatch.setattr(power, "kept", lambda _: judge_study(study, runs, reader=reader))
    monkeypatch.setattr(power, "cells", lambda _: [])
    gaps, found, loss = power.of_arms(study)
    assert list(found) == list(tokens)
    assert loss == pytest.approx(2.0)
    seen = np.stack([nats["worse", seed] for seed in study.seeds])
    np.testing.assert_allclose(gaps["worse"].of(2, draw), seen[1], atol=1e-9)
    drawn = np.stack([gaps["worse"].of(9, draw) for _ in range(4000)])
    np.testing.assert_allclose(drawn.mean(0), seen.mean(0), atol=0.01)
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(seen.T), atol=3e-4)
    more = replace(study, seeds=[*range(1, 9)])
    assert power.drawn(more, gaps, tokens, loss, 0) == {"worse": 1, "on par": 1, "runs": 24}
