"""The runner of slow tests tells good files, failures and hangs apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow import LONGEST, in_order, run_all

BODIES = {
    "good": "def test_a(): pass\ndef test_b(): pytest.skip('no such GPU')",
    "bad": "def test_a(): assert 1 == 2",
    "empty": "",
}
MARK = "import pytest, time\npytestmark = pytest.mark.slow\n"


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(MARK + body)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    monkeypatch.chdir(folder)


@pytest.mark.slow
def test_each_file_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, **BODIES)
    said: list[str] = []
    assert not run_all([f"{name}.py" for name in BODIES], 3, 240.0, said.append)
    lines = {line.split(": ")[0].split()[-1]: line for line in said if line[:3] in ("ok ", "BAD")}
    assert sorted(lines) == ["bad.py", "empty.py", "good.py"]
    assert lines["good.py"].startswith("ok ")
    assert "1 passed, 1 skipped" in lines["good.py"]
    assert "1 failed" in lines["bad.py"]
    assert "no tests ran" in lines["empty.py"]
    assert any("assert 1 == 2" in text for text in said)
    assert "2 with failures" in said[-3]


def test_the_longest_come_first_and_exist() -> None:
    assert in_order(["tests/a.py", *LONGEST[::-1]]) == [*LONGEST, "tests/a.py"]
    assert all((Path(__file__).parents[1] / file).is_file() for file in LONGEST)
