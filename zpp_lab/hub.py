"""Can the Hugging Face Hub be reached? Its own clients try for most of a minute before they say."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 3.0  # to wait for an answer
_ENDPOINT = "https://huggingface.co"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def asked_offline() -> bool:
    """Whether the user wants no network: the libraries then answer from their cache, at once."""
    return any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in _OFFLINE)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or _ENDPOINT


def reachable(seconds: float = SECONDS) -> bool:
    """Whether a connection to the Hub, or to the proxy in front of it, opens within `seconds`."""
    if asked_offline():
        return False
    answers: list[bool] = []
    place = _place(endpoint())
    # a name server that is silent cannot be given a limit, but it can be left alone
    asker = threading.Thread(target=lambda: answers.append(_opens(*place, seconds)), daemon=True)
    asker.start()
    asker.join(seconds)
    return bool(answers) and answers[0]


def why_not() -> str:
    if asked_offline():
        return f"{next(n for n in _OFFLINE if os.environ.get(n))} is set"
    return (
        f"{endpoint()} gives no answer within {SECONDS:g} s (HF_HUB_OFFLINE=1 asks the cache alone)"
    )


def _place(url: str) -> tuple[str, int]:
    """Host and port that are talked to first."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme) or getproxies().get("all")
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    ports = {"http": 80, "https": 443}
    return target.hostname or "", target.port or ports.get(target.scheme, 1080)


def _opens(host: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True
