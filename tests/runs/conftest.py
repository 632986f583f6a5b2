"""A wandb server small enough to read: it keeps what is sent, or has one of the wire's faults."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from zpp_lab.runs.wandb.run import forget


class FakeWandb:
    """`runs[id]` holds what was sent: its `lines` (JSON), `console`, `config`, `group`, `job_type`
    and `exit`.

    `fault` is None, "500s" (every answer), "drops" (the connection is cut at every attempt to
    send steps after the first `good`), "hangs" (so is it left without an answer) or "slow"
    (every answer takes `delay` seconds). `asked` counts requests by operation or path.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.fault: str | None = None
        self.good, self.delay = 1, 0.3
        self.streams = 0
        self.released = threading.Event()  # ends the hanging answers
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.artifacts: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        fake = self

        class Handler(_Handler):
            server_state = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def steps(self, run_id: str) -> list[int]:
        return [json.loads(line)["_step"] for line in self.runs[run_id]["lines"]]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def query(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(name)
        if name == "UpsertBucket":
            return {"upsertBucket": self._upsert(values)}
        if name == "RunResumeStatus":
            run = self.runs.get(values["name"])
            bucket = run and _bucket(values["name"], run)
            return {"model": {"name": "p", "entity": {"name": "e"}, "bucket": bucket}}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/up/{f}"} for f in values["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name in ("Viewer", "GetDefaultEntity"):
            return {"viewer": {"id": "v", "entity": "e", "username": "u", "flags": "{}"}}
        if "View" in name:  # a workspace or a report
            self.views.append(values)
            view = {"id": f"view{len(self.views)}", "name": values["name"], "type": values["type"]}
            return {"upsertView": {"view": {**view, **_view(values)}, "inserted": True}}
        if "Artifact" in name:
            return self._artifact(name, values)
        if name == "GetProjects":
            return {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}}
        return {"serverInfo": {"features": []}} if name == "ServerFeaturesQuery" else {}

    def _artifact(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        if name == "ArtifactType":
            return {"project": {"artifact": None}}
        if name == "CreateArtifact":  # "committed": a server that has these files already
            self.artifacts.append(values["input"])
            sequence = {"id": "s", "latestArtifact": {"id": "a", "versionIndex": 0}}
            made = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": made}}
        return {}

    def _upsert(self, values: dict[str, Any]) -> dict[str, Any]:
        name, new = values["name"], values["name"] not in self.runs
        run = self.runs.setdefault(name, {"lines": [], "console": [], "summary": "{}"})
        for ours, theirs in (("config",) * 2, ("group", "groupName"), ("job_type", "jobType")):
            run[ours] = values.get(theirs) or run.get(ours)
        run["tags"] = values.get("tags") or run.get("tags")
        run["display"] = values.get("displayName") or run.get("display")
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {**_bucket(name, run), "id": name, "sweepName": None, "project": project}
        return {"bucket": {**bucket, "description": ""}, "inserted": new}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        history = body.get("files", {}).get("wandb-history.jsonl")
        if history:
            self.runs[name]["lines"][history["offset"] :] = history["content"]
        said = body.get("files", {}).get("output.log")
        if said:
            self.runs[name]["console"][said["offset"] :] = said["content"]
        summary = body.get("files", {}).get("wandb-summary.json")
        if summary:
            self.runs[name]["summary"] = summary["content"][-1]
        if body.get("complete"):
            self.runs[name]["exit"] = body["exitcode"]


def _view(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "displayName": values["displayName"],
        "description": values.get("description", ""),
        "project": {"id": "p", "name": values["projectName"], "entityName": values["entityName"]},
        "createdAt": "2026-01-01T00:00:00Z",
        "updatedAt": "2026-01-01T00:00:00Z",
        "spec": values["spec"],
        "user": {"username": "u", "name": "u"},
        "previewUrl": "",
        "viewCount": 0,
    }


def _bucket(name: str, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "displayName": run.get("display") or name,
        "summaryMetrics": run["summary"],
        "historyLineCount": len(run["lines"]),
        "logLineCount": len(run["console"]),
        "eventsLineCount": 0,
        "historyTail": json.dumps(run["lines"][-1:]),
        "eventsTail": "[]",
        "config": "{}",
        "tags": [],
        "notes": "",
        "wandbConfig": '{"t":{"1":1}}',
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FakeWandb

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, content: Any) -> None:
        if self.server_state.fault == "slow":
            time.sleep(self.server_state.delay)
        data = json.dumps(content).encode()
        self.send_response(500 if self.server_state.fault == "500s" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.server_state.files[self.path.rsplit("/", 1)[-1]] = self._body()
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        body, state = self._body(), self.server_state
        if self.path.endswith("/graphql") and state.fault != "500s":
            asked = json.loads(body)
            named = re.search(r"\b(?:query|mutation)\s+(\w+)", asked["query"])
            name = asked.get("operationName") or (named[1] if named else "")
            answer = state.query(name, asked.get("variables") or {})
            return self._reply({"data": answer})
        if self.path.endswith("/file_stream") and state.fault != "500s":
            state.streams += 1
            if state.fault in ("drops", "hangs") and state.streams > state.good:
                return self._cut()
            state.stream(self.path.split("/")[-2], json.loads(body))
        return self._reply({})

    def _cut(self) -> None:
        if self.server_state.fault == "hangs":
            self.server_state.released.wait()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """No key, setting or mode of the person who runs the tests reaches them."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "240")  # its helper process starts slowly under load


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    server = FakeWandb()
    use_server(monkeypatch, server.url)
    yield server
    server.close()
    forget()


@pytest.fixture(params=["refuses", "never answers"])
def dead_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that is not there, or takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            listener.listen(64)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        use_server(monkeypatch, url)
        yield url
        forget()


def be_patient(folder: Path, seconds: float = 240.0) -> None:
    """The runs in `folder` wait so long for a server: by default, however slow this machine is."""
    for file in folder.rglob("config.yaml"):
        config = yaml.safe_load(file.read_text())
        if "tracking" in config:  # wandb has a file of this name too
            config["tracking"]["timeout_seconds"] = seconds
            file.write_text(yaml.safe_dump(config, sort_keys=False))


def use_server(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    forget()  # wandb keeps the address that a process met first: an offline run's default, say
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
