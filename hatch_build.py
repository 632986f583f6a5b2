"""Wheels and source archives carry the commit that they are built at, as zpp_lab/commit.txt.

A checkout asks git instead (`zpp_lab/runs/provenance.py`), so an editable install has no such file.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if (
            version == "editable"
            or self._git("ls-files", "--error-unmatch", "pyproject.toml") is None
        ):
            return  # built from a source archive, which brings the file, or from a bare copy
        head = (self._git("rev-parse", "HEAD") or "").strip()
        changed = self._git("status", "--porcelain", "--untracked-files=no")
        added = self._git("status", "--porcelain", "--", "zpp_lab", "conf", "cuda")
        self.folder = Path(tempfile.mkdtemp())
        file = self.folder / "commit.txt"
        file.write_text(head + ("-dirty" if changed or added else "") + "\n")
        build_data["force_include"][str(file)] = "zpp_lab/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def _git(self, *words: str) -> str | None:
        git = ["git", "-c", "safe.directory=*", "-C", self.root, *words]
        try:
            return subprocess.run(git, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
