"""A stranger's first minutes, examples/first_minutes.sh, in a clone with a home and packages of
its own: nothing of this checkout, and of this machine pip's settings and downloads alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zpp_lab.runs.reader import find_runs

ROOT = Path(__file__).parents[1]
VERDICT = r"(on par|worse|better|undecided|(above|below) zero)"
DOWNLOADS = re.compile(r"PIP_|SSL_CERT|REQUESTS_CA|(https?|no)_proxy$", re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_script_does_what_it_says(tmp_path: Path) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    pip = [sys.executable, "-m", "pip", "cache", "dir"]
    kept = {k: v for k, v in os.environ.items() if DOWNLOADS.match(k)} | {
        "PATH": os.defpath,
        "HOME": str(home),
        "PIP_CACHE_DIR": subprocess.check_output(pip, text=True).strip(),
        "PYTHON": str(Path(sys.base_prefix) / "bin" / "python3"),
    }
    done = subprocess.run(
        ["bash", "examples/first_minutes.sh"],
        cwd=clone, env=kept, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said[-6000:] + done.stderr[-6000:]
    parts = re.split(r"^== \d\. .*\n", said, flags=re.MULTILINE)
    assert re.search(rf"^ w2 \| {VERDICT}", parts[2], re.MULTILINE), "read from report.md"
    assert "67 runs, 61 finished already" in parts[3]
    assert "2 passed" in parts[4]
    for part, arm in ((parts[3], "w4_64"), (parts[4], "quantile4"), (parts[5], "w4")):
        assert re.search(rf"^{arm} +{VERDICT}", part, re.MULTILINE), part
    assert re.search(r"held-out loss \d\.\d+, perplexity", parts[6])
    assert re.search(rf"^\d+ +w2 +{VERDICT}", parts[7], re.MULTILINE)
    assert "66 runs, 3300 steps" in parts[7]
    counts = {"first": 66, "quantile": 9, "my_text": 4, "my_records": 1}
    for folder, count in counts.items():
        runs = find_runs(clone / "runs" / folder)
        assert sum(run.summary is not None for run in runs) == count, folder
