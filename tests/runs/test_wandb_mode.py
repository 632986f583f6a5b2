"""Which wandb mode is used, and what is said when it cannot be had."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from zpp_lab.runs.wandb.mode import find_key, resolve


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
        with pytest.raises(ValueError, match=rf"tracking\.wandb={wanted}"):
            resolve(wanted)
