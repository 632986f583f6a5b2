"""experiments/finetune_wires_older/compare.py: two studies that differ in their base."""

from __future__ import annotations

import json
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded

SCRIPT = "experiments/finetune_wires_older/compare.py"


def archive(folder: Path, heldout: dict[str, float], unfinished: tuple[str, ...] = ()) -> Path:
    """A study of two steps; `heldout`: the last loss of each run, by its folder."""
    folder.mkdir()
    with tarfile.open(folder / "runs.tar.xz", "w:xz") as packed:
        for run, loss in heldout.items():
            error = {kind: {"nmse": 0.5} for kind in ("attention", "mlp", "head")}
            wires = {"weights_forward": error, "grads_intra": error}
            told = {"step": 1, "loss": 2 * loss, "telemetry": wires}
            last = {"step": 2, "loss": loss, "heldout_loss": loss}
            files = {"metrics.jsonl": f"{json.dumps(told)}\n{json.dumps(last)}\n"}
            if run not in unfinished:
                ends = {"heldout_loss": loss, "heldout_loss_master": loss + 0.25}
                files["summary.json"] = json.dumps(ends)
            for name, text in files.items():
                member = tarfile.TarInfo(f"study/{run}/{name}")
                member.size = len(text)
                packed.addfile(member, BytesIO(text.encode()))
    return folder


def test_the_script_pairs_seeds_and_leaves_out_what_did_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"zero3/seed1": 1.0, "zero3/seed2": 2.0, "prepare/base": 3.0}
    bad = {"bad/seed1": 4.0, "bad/seed2": 4.0}
    young = archive(tmp_path / "young", base | bad | {"w4/seed1": 1.5, "w4/seed2": 2.5})
    more = base | bad | {"w4/seed1": 1.75, "w4/seed2": 2.75}
    older = archive(tmp_path / "older", more, unfinished=("bad/seed2",))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(young), str(older)])
    assert loaded(SCRIPT).main() == 0
    said = capsys.readouterr().out
    assert "bad" not in said
    gap = "+0.5000 ± 0.0000 | +0.7500 ± 0.0000 | +0.2500 ± 0.0000"
    pairs = ([50.0, 25.0], [75.0, 37.5], [25.0, 12.5])
    shares = [loaded(SCRIPT).spread(pair, 2) for pair in pairs]
    assert shares[0].startswith("+37.50 ± 158.8")
    whole = "+0.7500 ± 0.0000 | +1.1250 ± 0.0000 | +0.3750 ± 0.0000"
    assert f"| w4 | {gap} | {' | '.join(shares)} | {whole} |" in said
    assert "| w4 | young | +1.0000, +1.0000 | +0.5000 | +0.2500 |" in said
    assert "| w4 | older | 0.5, 0.5, 0.5 | 0.5, 0.5, 0.5 |" in said
    monkeypatch.setattr(sys, "argv", ["compare.py", str(young)])
    assert loaded(SCRIPT).main() == 2
    assert "YOUNG_FOLDER OLDER_FOLDER" in capsys.readouterr().err
