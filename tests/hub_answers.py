"""A hub without a network: the HTTP client reads given answers, raw as they come from a wire, one a connection."""

from __future__ import annotations

import hashlib
import json
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import huggingface_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@cache
def client() -> tuple[Any, list[bytes]]:
    """A client like the hub library's, and the answers that it is going to get; the last is followed by silence."""
    http = sys.modules[type(huggingface_hub.get_session()).__module__.split(".")[0]]
    core = sys.modules[http.__name__.replace("httpx", "httpcore")]
    waiting: list[bytes] = []

    class Wire(core.MockBackend):  # type: ignore[misc,name-defined]
        def connect_tcp(self, *_: Any, **__: Any) -> Any:
            data = waiting.pop(0) if waiting else b""
            return core.MockStream([data[i : i + 65536] for i in range(0, len(data), 65536)])

    transport = http.HTTPTransport()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    transport._pool = core.ConnectionPool(ssl_context=context, network_backend=Wire([]), max_keepalive_connections=0)
    return http.Client(transport=transport), waiting


@contextmanager
def answering(answers: list[bytes]) -> Iterator[None]:
    """Meanwhile the hub gives these answers, whatever it is asked."""
    found, waiting = client()
    waiting[:] = answers
    get_session = huggingface_hub.get_session
    huggingface_hub.get_session = lambda: found
    try:
        yield
    finally:
        huggingface_hub.get_session = get_session


def answer(status: str, body: bytes, *headers: str) -> bytes:
    """An answer as it comes from the wire."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def honest_answers(config: bytes, shard: bytes) -> list[list[bytes]]:
    """What a hub answers when a model of one shard is opened and fetched: with sizes, without, and by way of others."""

    def listing(size: int | None) -> bytes:
        files = [
            {"rfilename": "config.json", "size": len(config), "blobId": _object_id(config)},
            {
                "rfilename": "model.safetensors",
                "size": size,
                "lfs": {"size": size, "sha256": hashlib.sha256(shard).hexdigest(), "pointerSize": 134},
            },
        ]
        body = json.dumps({"id": "some-lab/tiny", "sha": COMMIT, "siblings": files}).encode()
        return answer("200 OK", body, "Content-Type: application/json")

    small, whole = answer("200 OK", config), answer("200 OK", shard)
    total = answer("206 Partial Content", shard[:1], f"Content-Range: bytes 0-0/{len(shard)}")
    part = answer("206 Partial Content", shard, f"Content-Range: bytes 0-{len(shard) - 1}/{len(shard)}")
    half = len(shard) // 2
    start = answer("206 Partial Content", shard[:half], f"Content-Range: bytes 0-{half - 1}/{len(shard)}")
    rest = answer("206 Partial Content", shard[half:], f"Content-Range: bytes {half}-{len(shard) - 1}/{len(shard)}")
    away, busy = answer("302 Found", b"", "Location: https://cdn.hub/x"), answer("503 Busy", b"", "Retry-After: 2")
    return [
        [listing(len(shard)), small, part, whole],
        [listing(None), small, total, part, whole],
        [busy, listing(len(shard)), away, small, start, rest, away, whole],
    ]


def _object_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
