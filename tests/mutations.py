"""Hostile inputs drawn from one source of randomness: real files changed a little, and structures made up."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

DEEP = "a deep list"
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 255, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 70, 10**400, -0.0, 1.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "\u202e", "9" * 5000),
    *([], {}, [[]], [None], [0, 0], [{}], {"a": 1}, {"": []}, {"__class__": "os.system"}, ["x"] * 300, DEEP),
)
DTYPES = ("F32", "BF16", "F16", "U8", "I32", "F64", "I64", "U32", "BOOL", "F8_E4M3", "F4", "C64", "", 3, None)
NESTED = (
    "{% set n = namespace(a=[1], b=[1], c=(1,)) %}{% for i in range(50) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% set n.c = (n.c, n.c) %}{% endfor %}"
)
SNIPPETS = (
    NESTED + "{{ n.a == n.b }}",
    NESTED + "{{ n.a in [n.b] }}",
    NESTED + "{{ [n.a, n.b]|sort }}",
    NESTED + "{{ {n.c: 1} }}",
    NESTED + "{{ [n.c]|unique|list }}",
    NESTED + "{{ n.a|string|length }}",
    "{% set x = ([[1] * 90000] * 90000)|sum(start=[]) %}",
    "{% set x = ('<!---->' * 900000)|striptags %}",
    "{% set x = ('a-' * 900000)|wordwrap(1) %}",
    "{{ ('http://a.b/(' * 9000)|urlize|length }}",
    "{{ 'a'|center(10**9) }}",
    "{% set x = range(9)|batch(10**9, 0)|list %}",
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.__reduce__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages|attr('__class__') }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{{ messages }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**9 }}",
    "{{ 9**(9**9) }}",
    "{{ range(10**12)|list }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'x'|indent(10**9) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ 'ab'.replace('', 'c' * 90000) }}",
    "{{ ('x' * 90000).join('y' * 90000) }}",
    "{% set x = [] %}{% for i in range(99) %}{% set _ = x.append(x) %}{% endfor %}{{ x }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=(1,)) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{% extends 'x' %}",
    "{{ messages|map('upper')|sort|join }}",
    "{{ messages|groupby('role') }}",
    "{{ strftime_now('%999999d') }}",
    "{% set messages = messages + messages %}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{% if x %}" * 40 + "y" + "{% endif %}" * 40,
    "{% raw %}",
    "{{",
    "#}",
)
SYLLABLES = ("{{ ", " }}", "{% ", " %}", "for ", "in ", "if ", "set ", "x", " = ", "|", "length", "[0]", ".", "(", ")")

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
FILES = (
    *("manifest.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "special_tokens_map.json", "additional_chat_templates", "experts"),
    *("resident.safetensors", "embedding.safetensors", "mtp.safetensors", "experts/layer-002.safetensors"),
    *("model.safetensors", "model.safetensors.index.json", "additional_chat_templates/a.jinja", "x.safetensors"),
)
KINDS = ("fifo", "socket", "directory", "missing", "empty", "pointer", "huge header", "huge file", "link", "link")
ENDS = (
    *("/dev/zero", "/dev/stdin", "/dev/tty", "/proc/self/mem", "/etc/passwd", "/", ".", "..", "nothing", "\u202e"),
    *("../other/config.json", "../other/tokenizer.json", "../other/experts", "../other/resident.safetensors"),
    *("config.json", "tokenizer.json", "experts", "resident.safetensors", "a", "../store/config.json"),
)

Make = Callable[[random.Random, Sequence[bytes]], bytes]


def encoded(data: Any, rng: random.Random) -> bytes:
    """JSON, with lists nested deeper than an encoder goes where `DEEP` stands."""
    depth = rng.choice((60, 200, 5000))
    return json.dumps(data).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()


def made_up(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = rng.randrange(4 if depth < 4 else 2)
    if kind == 2:
        return [made_up(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 3:
        return {rng.choice(("a", "dtype", "shape", "model", "type", "")): made_up(rng, depth + 1) for _ in range(4)}
    return copy.deepcopy(rng.choice(VALUES))


def changed_tree(rng: random.Random, data: Any, words: Sequence[Any]) -> Any:
    """`data`, changed in place, with a node replaced, doubled, renamed or gone; `words` stand among the values."""
    node, above, key = data, None, None
    while isinstance(node, dict | list) and node and (above is None or rng.randrange(4)):
        above, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[key]
    value = rng.choice(words) if words and rng.randrange(3) == 0 else made_up(rng, 3)
    if above is None:
        return value
    action = rng.randrange(6)
    if action == 0:
        del above[key]
    elif action == 1 and isinstance(above, dict):
        above[str(value)[:50]] = above.pop(key)
    elif action == 1:
        above.extend(above[: rng.randrange(200)])
    elif action == 2 and isinstance(node, int | float):
        above[key] = node * rng.choice((-1, 0, 2, 1000)) + rng.choice((-1, 0, 1))
    elif action == 2 and isinstance(node, str):
        above[key] = node[: rng.randrange(len(node) + 1)] + str(value)[:100]
    else:
        above[key] = value
    return data


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with bits flipped, a range cut out, doubled or overwritten, or the end gone."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 8, 100))
        action = rng.randrange(5)
        if action == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del found[at : at + length]
        elif action == 2:
            found[at:at] = found[at : at + length]
        elif action == 3:
            found[at : at + length] = rng.choice((b"\0", b"\xff", b"9", b"[", b'"', b"{")) * length
        elif rng.randrange(10) == 0:
            del found[at:]
    return bytes(found)


def json_text(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A JSON file: a seed changed as a tree or as bytes, or made up."""
    seed = rng.choice(seeds)
    kind = rng.randrange(10)
    if kind == 0:
        return changed_bytes(rng, seed) if rng.randrange(10) else POINTER
    data = made_up(rng) if kind == 1 else json.loads(seed)
    words = list(data) if isinstance(data, dict) else []
    for _ in range(rng.randrange(1, 4)):
        data = changed_tree(rng, data, words)
    return encoded(data, rng)


def safetensors(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A safetensors file: a seed with its header changed, its bytes changed, or tensors made up."""
    seed = rng.choice(seeds)
    start = 8 + int.from_bytes(seed[:8], "little")
    kind = rng.randrange(10)
    if kind == 0:
        return changed_bytes(rng, seed) if rng.randrange(10) else POINTER
    if kind == 1:
        return rng.choice((0, 1, start, 300 << 20, 1 << 31, 1 << 63)).to_bytes(8, "little") + seed[8:]
    header, data = json.loads(seed[8:start]), seed[start:]
    if kind < 5:
        for name in rng.sample(list(header), rng.randrange(len(header) + 1)):
            size = rng.choice((0, 1, 4, 4096))
            entry = {"dtype": rng.choice(DTYPES), "shape": [size, rng.choice((0, 1, 2, 1 << 40))]}
            header[name] = entry | {"data_offsets": [0, rng.choice((0, 4, size * 4, size * 8))]}
    else:
        for _ in range(rng.randrange(1, 4)):
            header = changed_tree(rng, header, list(header) if isinstance(header, dict) else [])
    text = encoded(header, rng)
    return len(text).to_bytes(8, "little") + text + data[: rng.choice((len(data), len(data) // 2))]


def saved_state(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A saved state: as `safetensors`, or with tokens, numbers, their count, the header's size or the end changed."""
    if rng.randrange(2):
        return safetensors(rng, seeds)
    seed = rng.choice(seeds)
    start = 8 + int.from_bytes(seed[:8], "little")
    header, data = json.loads(seed[8:start]), bytearray(seed[start:])
    tokens, kind = header["tokens"], rng.randrange(6)
    if kind == 0:
        count = rng.choice((0, 1, 2, 4, 5, 1 << 20))
        words = struct.pack(f"<{count}i", *(rng.randrange(3) for _ in range(count)))
        at = len(data) // 4 * 4
        tokens.update(shape=[count], data_offsets=[at, at + len(words)])
        data = data[:at] + words
    elif kind == 1:
        at = tokens["data_offsets"][0] + 4 * rng.randrange(3)
        data[at : at + 4] = struct.pack("<i", rng.choice((-(1 << 31), -1, 0, 7, 2047, 2048, 1 << 20, (1 << 31) - 1)))
    elif kind == 2:
        at = rng.randrange(len(data) // 4) * 4
        data[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), -float("inf"), 1e38, -0.0)))
    elif kind == 3:
        data += bytes(rng.choice((1, 4, 4096, 1 << 20)))
    elif kind == 4:
        header["__metadata__"]["note"] = "x" * rng.choice((1, 1000, 900_000, 2_000_000))
    else:
        name = rng.choice([name for name in header if name != "__metadata__"])
        header[name]["dtype"] = rng.choice(DTYPES)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def template(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A Jinja template: a seed with bytes changed and hostile expressions put in, or syllables at random."""
    if rng.randrange(5) == 0:
        return "".join(rng.choice(SYLLABLES + SNIPPETS) for _ in range(rng.randrange(40))).encode()
    text = rng.choice(seeds)
    if rng.randrange(2):
        text = changed_bytes(rng, text)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(SNIPPETS + SYLLABLES).encode() + text[at:]
    return text


BETWEEN = b"\n=====\n"
STATUSES = b"100 103 200 204 206 302 304 401 403 404 416 429 503 999".split()
HEADERS = (
    *(b"Content-Length: 0", b"Content-Length: 6000000000", b"Content-Length: -1", b"Content-Length: x"),
    *(b"Content-Range: bytes 0-0/1", b"Content-Range: bytes 0-9/*", b"Content-Range: bytes */5", b"Content-Range: x"),
    *(b"Content-Range: bytes 0-" + b"9" * 5000 + b"/1", b"Content-Type: multipart/byteranges; boundary=x"),
    *(b"Content-Encoding: gzip", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
    *(b"Location: /other", b"Location: file:///etc/passwd", b"Location: https://[", b"Location: " + b"x" * 5000),
    *(b"X-Error-Code: GatedRepo", b"X-Error-Code: RevisionNotFound", b"X-Error-Message: \xff\x1b[2J", b"\0: \0"),
    *(b"Retry-After: 1", b"Retry-After: " + b"9" * 5000, b"Retry-After: Wed, 21 Oct 99999", b'RateLimit: "a";r=0;t=9'),
    *(b"Set-Cookie: a=b", b"Connection: close", b"X: " + b"y" * 50_000, b" folded", b"no colon"),
)


def answers(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Answers of a web server, one after the other: of a seed, with status, headers or body changed, cut or doubled."""
    found = rng.choice(seeds).split(BETWEEN)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(found))
        top, _, body = found[at].partition(b"\r\n\r\n")
        first, *headers = top.split(b"\r\n")
        action = rng.randrange(8)
        if action == 0:
            first = first.replace(first[9:12], rng.choice(STATUSES), 1)
        elif action == 1 and headers:
            headers[rng.randrange(len(headers))] = rng.choice(HEADERS)
        elif action == 2:
            headers.insert(rng.randrange(len(headers) + 1), rng.choice(HEADERS))
        elif action == 3 and headers:
            del headers[rng.randrange(len(headers))]
        elif action == 4 and body[:1] == b"{":
            with suppress(ValueError, RecursionError):  # a body that was broken before stays so
                body = json_text(rng, [body])
            headers = [b"Content-Length: %d" % len(body) if h.startswith(b"Content-Length") else h for h in headers]
        elif action == 5:
            body = rng.choice((body[: len(body) // 2], body * 2, body * 300, b"", changed_bytes(rng, body)))
        elif action == 6:
            found.insert(at, found[rng.randrange(len(found))])
        else:
            top = changed_bytes(rng, top)
            first, *headers = top.split(b"\r\n")
        found[at] = b"\r\n".join([first, *headers]) + b"\r\n\r\n" + body
    return BETWEEN.join(found)


def places(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """What lies where in a directory: JSON of whether links are followed and of (name, kind, where a link leads)."""
    found = [[rng.choice(FILES), rng.choice(KINDS), rng.choice(ENDS)] for _ in range(rng.randrange(1, 4))]
    return json.dumps({"follow": rng.randrange(2) == 1, "places": found}).encode()
