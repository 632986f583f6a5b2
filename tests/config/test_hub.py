"""The Hub is asked for seconds only, through the proxy where there is one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from zpp_lab import files
from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), "HF_ENDPOINT", *files._OFFLINE):
        monkeypatch.delenv(name, raising=False)


def test_an_open_port_is_reachable_and_a_closed_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert files.reachable()
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        assert files.reachable()  # the proxy looks the name up
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not files.reachable()
        assert files.why_not() == "HF_HUB_OFFLINE is set"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not files.reachable()


def test_a_silent_name_server_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    end = Event()
    monkeypatch.setattr(files, "_opens", lambda *_: end.wait(60))
    assert not files.reachable(0.05)
    end.set()


class Library:
    """transformers, as far as it matters here: what it was asked."""

    def __init__(self, fails: bool) -> None:
        self.AutoConfig, self.fails, self.asked = self, fails, []  # type: ignore[var-annotated]

    def from_pretrained(self, path: str, local_files_only: bool) -> Any:
        self.asked.append((path, local_files_only))
        if self.fails:
            raise OSError("nothing found\nlong story")
        return "config"


@pytest.mark.parametrize("online", [True, False])
def test_names_stay_possible_and_the_cache_serves_without_a_network(
    online: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zpp_lab.models.hf import _config_at

    monkeypatch.setattr(files, "reachable", lambda: online)
    library = Library(fails=False)
    assert _config_at(library, "owner/name") == "config"
    assert library.asked == [("owner/name", not online)]
    says = "owner/name.*hf download" if online else "hf download owner/name --local-dir FOLDER"
    with pytest.raises(ValueError, match=says):
        _config_at(Library(fails=True), "owner/name")


def test_folders_are_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "reachable", lambda: pytest.fail("the Hub was asked"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{")
    for name, says in (("lama", "did you mean .*llama"), ("llama", "cannot read its config")):
        with pytest.raises(ValueError, match=says):
            build_model(ModelConfig(name="hf", path=str(tmp_path / name)), 256, "meta")
    with pytest.raises(ValueError, match=r"model\.weights=pretrained"):
        build_model(ModelConfig(name="hf", path="owner/name", weights="pretrained"), 256, "meta")
