"""Steps and the commits that made them."""

from __future__ import annotations

import json
from pathlib import Path

from zpp_lab.runs.provenance import FILE, note_commit


def test_only_what_differs_and_is_not_repeated_is_kept(tmp_path: Path) -> None:
    assert note_commit(tmp_path, 0, "a") == [{"after": 0, "commit": "a"}]
    assert note_commit(tmp_path, 4, "a") == [{"after": 0, "commit": "a"}]
    both = [{"after": 0, "commit": "a"}, {"after": 6, "commit": "b"}]
    assert note_commit(tmp_path, 6, "b") == both == json.loads((tmp_path / FILE).read_text())
    assert note_commit(tmp_path, 6, "a") == both[:1]
    assert note_commit(tmp_path, 0, "b") == [{"after": 0, "commit": "b"}]


def test_what_came_before_the_first_note_is_not_known(tmp_path: Path) -> None:
    made = [{"after": 0, "commit": None}, {"after": 5, "commit": "a"}]
    assert note_commit(tmp_path, 5, "a") == made
