"""Reading an untrusted manifest: everything it says is checked against the model of its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import StoreError
from ..spec import ModelSpec, Quantisation, RecordLayout, record_layout
from .format import (
    CONFIG,
    EMBEDDING,
    FORMAT,
    MTP,
    RESIDENT,
    VERSION,
    check_quantisation,
    store_files,
    tensors_of,
    verbatim,
)
from .manifest import Copied, FileEntry, Manifest


class _Malformed(Exception):
    pass


def _need(condition: Any, what: str) -> None:
    if not condition:
        raise _Malformed(what)


def _natural(value: Any, what: str) -> int:
    _need(type(value) is int and 0 <= value < 1 << 62, f"{what} is no size")
    return int(value)


def _hex(value: Any, what: str) -> str:
    _need(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value), f"{what} is no SHA-256")
    return str(value)


def _object(value: Any, what: str) -> dict[str, Any]:
    _need(isinstance(value, dict), f"{what} is no object")
    return dict(value)


def _list(value: Any, what: str) -> list[Any]:
    _need(isinstance(value, list), f"{what} is no list")
    return list(value)


def _quantisation(data: Any, cols: int, what: str) -> Quantisation:
    fields = _object(data, what)
    _need({type(fields.get(k)) for k in ("bits", "group")} == {int}, f"{what} lacks bits or group")
    q = Quantisation(fields["bits"], fields["group"], fields.get("mode", ""), fields.get("scale_dtype", ""))
    reason = check_quantisation(q, cols)
    _need(reason is None, f"{what}: {reason}")
    return q


def _layout(data: Any, spec: ModelSpec) -> RecordLayout:
    fields = _object(data, "a record layout")
    gate_up = _quantisation(fields.get("gate_up"), spec.hidden, "gate_up of a record layout")
    down = _quantisation(fields.get("down"), spec.inter, "down of a record layout")
    layout = record_layout(spec.hidden, spec.inter, gate_up, down)
    _need(
        fields == layout.to_json(), f"a record layout disagrees with hidden {spec.hidden} and intermediate {spec.inter}"
    )
    return layout


def _entry(data: Any, name: str) -> FileEntry:
    fields = _object(data, name)
    tensors, records = fields.get("tensors"), fields.get("records")
    _need((tensors is None) != (records is None), f"{name} needs digests of either tensors or records")
    return FileEntry(
        _natural(fields.get("bytes"), f"{name} bytes"),
        _hex(fields.get("header"), f"{name} header"),
        _hex(fields.get("digest"), f"{name} digest"),
        None if tensors is None else {k: _hex(v, f"{name} {k}") for k, v in _object(tensors, name).items()},
        None if records is None else [_hex(v, f"{name} record {i}") for i, v in enumerate(_list(records, name))],
    )


def _same(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    extra, missing = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    _need(not extra, f"{what} lists {extra[:3]}, which no such model has")
    _need(not missing, f"{what} lacks {missing[:3]}")


def _manifest(data: Mapping[str, Any], spec: ModelSpec) -> Manifest:
    layouts = _object(data.get("layouts"), "layouts")
    distinct = [_layout(x, spec) for x in _list(layouts.get("distinct"), "layouts")]
    trunk = _list(layouts.get("trunk"), "layouts.trunk")
    _need(len(trunk) == len(spec.layer_types), f"layouts.trunk has {len(trunk)} of {len(spec.layer_types)} layers")

    def layout_of(index: Any) -> RecordLayout | None:
        _need(
            index is None if not spec.is_moe else type(index) is int and 0 <= index < len(distinct),
            f"a layer's layout is {index!r}, which does not fit a model of {spec.experts} experts",
        )
        return None if index is None else distinct[index]

    mtp = data.get("mtp")
    _need(isinstance(mtp, bool), "mtp is neither true nor false")
    columns = {
        t.name: t.shape[-1] for file in (RESIDENT, EMBEDDING, MTP) for t in tensors_of(spec, file) if t.kind == "matrix"
    }
    quantisation = {}
    for name, fields in _object(data.get("quantisation"), "quantisation").items():
        _need(name in columns, f"quantisation names {name[:100]!r}, which is no matrix of this model")
        quantisation[name] = _quantisation(fields, columns[name], f"quantisation of {name}")
    files = _object(data.get("files"), "files")
    _same(files, store_files(spec, bool(mtp)), "files")
    copied = _object(data.get("copied"), "copied")
    _need(
        len(verbatim(copied)) == len(copied) and CONFIG in copied,
        "copied names a file that a store does not have, or no config.json",
    )
    _need(data.get("norms") in ("w", "1+w"), f"norms is {data.get('norms')!r}, neither 'w' nor '1+w'")
    _need(data.get("tied") is None or data["tied"] is False, f"tied is {data.get('tied')!r}; false is all that it says")
    return Manifest(
        source=_object(data.get("source"), "source"),
        policy=str(data.get("policy")),
        norms=data["norms"],
        quantisation=quantisation,
        layouts=tuple(layout_of(i) for i in trunk),
        mtp=bool(mtp),
        mtp_layout=layout_of(layouts.get("mtp")) if mtp else None,
        files={name: _entry(e, name) for name, e in files.items()},
        copied={
            name: Copied(_natural(_object(c, name).get("bytes"), name), _hex(c.get("sha256"), name))
            for name, c in copied.items()
        },
        tied=data.get("tied"),
    )


def stored_spec(data: Mapping[str, Any], spec: ModelSpec) -> ModelSpec:
    """The model of a store whose config.json says `spec`: its head may be its own against that."""
    return replace(spec, tied=False) if data.get("tied") is False else spec


def parse_manifest(data: Mapping[str, Any], spec: ModelSpec, where: str) -> Manifest:
    """Check an untrusted manifest against the model it claims to hold. Raises StoreError."""
    try:
        return _manifest(data, spec)
    except _Malformed as reason:
        raise StoreError(f"{where} does not describe this model: {reason}; convert the checkpoint again.") from None


def check_version(data: Mapping[str, Any], where: str) -> None:
    """Refuse what is no store, and a store of a format version this library does not know. Raises StoreError."""
    version = data.get("version")
    if data.get("format") != FORMAT or type(version) is not int:
        raise StoreError(f"{where} is not the manifest of an mlx_ttd store; make one with `mlx-ttd convert`.")
    if version > VERSION:
        raise StoreError(f"{where} has format version {version}; this library reads up to {VERSION}: upgrade mlx_ttd.")
    if version < 1:
        raise StoreError(f"{where} has format version {version}, which never existed; convert the checkpoint again.")
