"""experiments/speed/share_probe.py: what it makes of what ranks say; the whole of it with gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.test_check_cost import script
from tests.tools.links.shared import refusal
from zpp_lab.config.schema import ClusterConfig


@pytest.fixture(scope="module")
def probe() -> Any:
    return script("share_probe")


def judged(probe: Any, *ranks: list[dict[str, Any]]) -> tuple[bool, list[str]]:
    report = probe.Report(60.0)
    trial = probe.Trial("t", ClusterConfig(nodes=2, gpus_per_node=1), ("client", "reduce"))
    good = probe.judged(trial, list(ranks), report)
    return good, [f"{one['ok']} {one['part']}: {one['said']}" for one in report.found]


def said(test: str, ok: bool, text: str) -> list[dict[str, Any]]:
    return [{"test": test}, {"test": test, "ok": ok, "said": text}]


def test_each_part_is_told_with_the_rank_and_error_that_matter(probe: Any) -> None:
    fine = said("client", True, "H200")
    good = [*fine, *said("reduce", True, "1 ms")]
    assert judged(probe, good, good) == (True, ["True t, client: H200", "True t, reduce: 1 ms"])
    waits, fails = [*fine, {"test": "reduce"}], [*fine, *said("reduce", False, "NcclError: x")]
    found = judged(probe, waits, fails)
    assert found == (False, ["True t, client: H200", "False t, reduce: rank 1 NcclError: x"])
    assert "under way when its time was up" in judged(probe, waits, waits)[1][1]
    lost = judged(probe, said("start", False, "no CUDA"), good)
    assert lost == (False, ["False t, start: rank 0 no CUDA"])


def test_a_rank_that_says_nothing_leaves_its_last_line(probe: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nImportError: libcuda\n")
    assert probe.lines(log) == [{"test": "start", "ok": False, "said": "ImportError: libcuda"}]


def test_what_cannot_be_placed_is_a_line_too(probe: Any) -> None:
    report = probe.Report(60.0)
    trial = probe.Trial("t", ClusterConfig(nodes=2, gpus_per_node=2), ("client",))
    assert not probe.run(trial, ["0"], report, 1.0)
    assert "ranks of one node cannot" in report.found[0]["said"]


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_the_whole_of_it_with_gloo(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "probe.json"
    words = ["share_probe.py", "--cpu", "--seconds", "200", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert probe.main() == 0
    assert [one["part"] for one in json.loads(out.read_text())] == [
        "machine",
        "2 × 2 by gloo, reduce",
    ]
    assert "nodes can talk by gloo here" in capsys.readouterr().out
