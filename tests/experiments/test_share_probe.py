"""experiments/speed/share_probe.py: the whole of it with gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.test_check_cost import script
from tests.tools.links.shared import refusal


@pytest.fixture(scope="module")
def probe() -> Any:
    return script("share_probe")


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
