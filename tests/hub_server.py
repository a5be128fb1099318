"""A hub played by a local server, which misbehaves where it is told to."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-lab/tiny-moe"

Fault = Callable[[BaseHTTPRequestHandler], None]


class Hub:
    """What the server serves, and what it was asked for: whole files by name, and bytes of ranges.

    Each question for a file takes the next of its `faults`, if there is one, instead of an answer; those for the
    list are under "list", which `listing` changes.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.listing: Callable[[dict[str, Any]], object] = lambda data: None
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.damaged: set[str] = set()
        self.whole: Counter[str] = Counter()
        self.ranged: Counter[str] = Counter()

    def info(self) -> dict[str, Any]:
        def sibling(name: str, data: bytes) -> dict[str, Any]:
            found = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if name.endswith(".safetensors"):
                found["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            return found

        found = {"id": REPO, "sha": COMMIT, "siblings": [sibling(*item) for item in self.files.items()]}
        self.listing(found)
        return found


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            known = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
            name = "list" if path.startswith("/api/") else known if known != path else path.rsplit("/", 1)[-1]
            hub.asked.append((name, dict(self.headers)))
            if hub.faults[name]:
                self.close_connection = True
                return hub.faults[name].pop(0)(self)
            if path in (
                f"/api/models/{REPO}",
                f"/api/models/{REPO}/revision/main",
                f"/api/models/{REPO}/revision/{COMMIT}",
            ):
                return self.answer(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})
            if not path.startswith(f"/{REPO}/resolve/{COMMIT}/") or name not in hub.files:
                return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            data = hub.files[name]
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if self.command == "GET" and "Range" in self.headers:
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                hub.ranged[name] += len(part)
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                return self.answer(206, part, headers)
            if self.command == "GET":
                hub.whole[name] += 1
                if name in hub.damaged:
                    data = data[:-1] + bytes([data[-1] ^ 1])
            return self.answer(200, data, headers)

        do_HEAD = do_GET

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, *_: Any) -> None:
        """Clients leave in the middle of an answer; that is what is tested."""


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address of a server of this hub."""
    server = Server(("127.0.0.1", 0), handler(hub))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


def status(code: int, **headers: str) -> Fault:
    """Answer with this status and no body; `X_Error_Code` names the header X-Error-Code."""

    def fault(to: BaseHTTPRequestHandler) -> None:
        to.send_response(code)
        for key, value in {"Content_Length": "0", **headers}.items():
            to.send_header(key.replace("_", "-"), value)
        to.end_headers()

    return fault


def sending(code: int, blocks: Callable[[], Iterator[bytes]], **headers: str) -> Fault:
    """Answer with these blocks, as they come, and close; without a length unless `headers` have one."""

    def fault(to: BaseHTTPRequestHandler) -> None:
        to.send_response(code)
        for key, value in headers.items():
            to.send_header(key.replace("_", "-"), value)
        to.end_headers()
        with suppress(OSError):
            for block in blocks():
                to.wfile.write(block)

    return fault
