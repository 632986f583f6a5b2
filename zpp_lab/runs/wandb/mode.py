"""Which wandb mode a run uses, found without importing wandb (that takes a second).

`auto` means: what WANDB_MODE says; else online when a key is at hand, offline
when there is none, and off when the package is not installed.
"""

from __future__ import annotations

import configparser
import importlib.util
import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "off"]

_WANDB_MODE: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "off",
}


def resolve(wanted: str) -> tuple[Mode, str]:
    """Return the mode to use for `tracking.wandb=wanted`, and why.

    ValueError when the settings ask for what this machine cannot do.
    """
    if wanted == "off":
        return "off", "tracking.wandb=off"
    if not installed():
        return _without_package(wanted)
    if wanted == "offline":
        return "offline", "tracking.wandb=offline"
    key = find_key()
    if wanted == "online" and key is None:
        raise ValueError(
            "tracking.wandb=online needs an API key: run `wandb login`, set WANDB_API_KEY, "
            "or use tracking.wandb=offline"
        )
    return (
        ("online", f"tracking.wandb=online, key from {key}") if wanted == "online" else _auto(key)
    )


def check_can_send() -> None:
    """Raise ValueError where runs cannot be sent: without the package or a key."""
    if installed() and find_key() is None:
        raise ValueError("wandb needs an API key: run `wandb login`, or set WANDB_API_KEY")
    resolve("online")


def _without_package(wanted: str) -> tuple[Mode, str]:
    if wanted != "auto":
        raise ValueError(
            f"tracking.wandb={wanted} needs the wandb package: run `pip install wandb`, "
            "or use tracking.wandb=off"
        )
    return "off", "the wandb package is not installed (pip install wandb)"


def _auto(key: str | None) -> tuple[Mode, str]:
    asked = os.environ.get("WANDB_MODE")
    if asked:
        if asked not in _WANDB_MODE:
            raise ValueError(f"WANDB_MODE={asked}: use one of {', '.join(_WANDB_MODE)}")
        return _WANDB_MODE[asked], f"WANDB_MODE={asked}"
    return ("online", f"key from {key}") if key else ("offline", "no key found")


def installed() -> bool:
    """Return whether wandb can be imported; a mere folder of that name cannot."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def find_key() -> str | None:
    """Return where an API key for the server was found, None without one; not the key."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(name):
            return name
    settings = _settings()
    if settings.get("api_key"):
        return "wandb's settings file"
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
    return _netrc_with_key(urlsplit(url).netloc)


def _netrc_with_key(host: str) -> str | None:
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            found = netrc.netrc(path.expanduser()).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if found and found[2]:
            return str(path)
    return None


def _settings() -> dict[str, str]:
    """wandb's own settings, the working folder's over the user's."""
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    folder = Path(os.environ.get("WANDB_DIR") or ".")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([user / "settings", folder / "wandb" / "settings"])
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}
