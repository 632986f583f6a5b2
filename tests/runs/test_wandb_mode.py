"""Which wandb mode is used, and what is said when it cannot be had."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from zpp_lab.runs.wandb.mode import find_key, installed, resolve


def test_auto_is_offline_without_a_key() -> None:
    assert resolve("auto") == ("offline", "no key found")


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_auto_is_online_with_a_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "s3cret")
    mode, why = resolve("auto")
    assert mode == "online"
    assert name in why
    assert "s3cret" not in why


@pytest.mark.parametrize(
    ("machine", "base_url", "found"),
    [
        ("api.wandb.ai", None, True),
        ("wandb.example.org:8080", "http://wandb.example.org:8080", True),
        ("api.wandb.ai", "https://wandb.example.org", False),
    ],
)
def test_netrc_key_counts_for_its_own_server(
    monkeypatch: pytest.MonkeyPatch, machine: str, base_url: str | None, found: bool
) -> None:
    Path(os.environ["NETRC"]).write_text(f"machine {machine}\n login user\n password k\n")
    if base_url:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    assert (find_key() is not None) == found


def test_settings_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "user"))
    Path(os.environ["NETRC"]).write_text("machine own.example\n login user\n password k\n")
    (tmp_path / "user").mkdir()
    (tmp_path / "wandb").mkdir()
    assert find_key() is None
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://own.example\n")
    assert find_key() == os.environ["NETRC"]
    (tmp_path / "user" / "settings").write_text("[default]\napi_key = k\n")
    assert find_key() == "wandb's settings file"
    (tmp_path / "user" / "settings").write_text("no settings at all")
    assert find_key() is None  # wandb reads nothing from a broken file either


@pytest.mark.parametrize(
    ("word", "mode"), [("offline", "offline"), ("disabled", "off"), ("online", "online")]
)
def test_wandbs_own_variable_decides_auto(
    monkeypatch: pytest.MonkeyPatch, word: str, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", word)
    assert resolve("auto") == (mode, f"WANDB_MODE={word}")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert resolve("offline")[0] == "offline"


def test_unknown_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ValueError, match="use one of online"):
        resolve("auto")


def test_online_without_a_key_names_the_fix() -> None:
    with pytest.raises(ValueError, match=r"wandb login.*WANDB_API_KEY.*offline"):
        resolve("online")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    mode, why = resolve("auto")
    assert mode == "off"
    assert "pip install wandb" in why
    assert resolve("off")[0] == "off"
    for wanted in ("online", "offline"):
        with pytest.raises(ValueError, match=f"tracking.wandb={wanted} needs the wandb package"):
            resolve(wanted)


def test_a_folder_named_wandb_is_no_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    assert not installed()
