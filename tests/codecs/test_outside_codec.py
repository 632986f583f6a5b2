"""Runs the commands of GUIDE's section "Your own quantizer" on examples/quantizer.

An environment of its own borrows this one's packages; its `pip` is kept from the network, its
`zpp-lab study` from training for minutes.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.dim=32 model.ffn=64 model.layers=1 data.seq_len=32 data.max_bytes=200000 "
    "train.steps=4 train.eval_tokens=2048 tracking.wandb=off engine.device=cpu engine.threads=1"
)


def commands() -> str:
    """The section's shell commands."""
    page = (ROOT / "GUIDE.md").read_text()
    found = re.search(r"^## Your own quantizer\n.*?^```sh\n(.*?)^```$", page, re.M | re.S)
    assert found, "GUIDE.md has no section 'Your own quantizer' with commands"
    return found[1]


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a fresh virtual environment that sees this one's packages."""
    home = tmp_path / "env"
    venv.create(home, symlinks=True)
    bin_ = home / "bin"
    own = subprocess.check_output(
        [bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    here = sysconfig.get_path("purelib")
    Path(own.strip(), "borrowed.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    script(bin_ / "pip", 'exec python -m pip "$@" --no-index --no-deps --no-build-isolation -q')
    small = f'[ "$1" = study ] && set -- "$@" --seeds 1 {SMALL} data.cache_dir={tmp_path}/cache'
    script(bin_ / "zpp-lab", f'{small}\nexec python -m zpp_lab.cli "$@"')
    script(bin_ / "open", 'test -s "$1"')
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "PIP_", "PYTHON"))}
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    checkout = str(ROOT)  # the package may not be installed where the tests run
    return kept | {"PATH": path, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_example_makes_a_codec_studies_it_and_reports(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    work = tmp_path / "work"
    shutil.copytree(ROOT / "examples" / "quantizer", work / "examples" / "quantizer")
    done = subprocess.run(
        ["sh", "-e", "-x", "-c", commands()],
        cwd=work, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    check_report(work / "runs" / "quantile", done.stdout)


def check_report(root: Path, printed: str) -> None:
    """Every arm has its verdict, and outside codes are counted like the built-in ones."""
    assert re.search(
        r"^quantile4 +(on par|worse|better|undecided|(above|below) zero(,| but)) ", printed, re.M
    ), printed
    page, text = ((root / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert re.search(
        r"^\| quantile4 \| (on par|worse|better|undecided|(above|below) zero(,| but))",
        text,
        re.M,
    )
    assert "15 normal quantiles" in page
    rows = {(row["arm"], row["seed"]): row for row in csv.DictReader((root / "results.csv").open())}
    assert {arm for arm, _ in rows} == {"zero3", "w4", "quantile4"}
    mine, even = rows["quantile4", "1"], rows["w4", "1"]
    assert mine["bytes_weights_forward_inter"] == even["bytes_weights_forward_inter"]
    assert mine["heldout_loss"] != even["heldout_loss"]
