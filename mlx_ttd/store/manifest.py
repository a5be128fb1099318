"""manifest.json as data: what a store says about itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ..spec import Quantisation, RecordLayout
from .format import FORMAT, VERSION, Norms

Digests = dict[str, str]


@dataclass(frozen=True)
class FileEntry:
    """One tensor file: its size, digest, and the SHA-256 of its header and of each tensor or each record, in order."""

    bytes: int
    header: str
    digest: str
    tensors: Digests | None
    records: list[str] | None

    def part_digests(self) -> list[str]:
        """The digests under the file's, in the file's order."""
        return list((self.tensors or {}).values()) + (self.records or [])


@dataclass(frozen=True)
class Copied:
    """A file taken verbatim from the source."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds. `quantisation` maps packed dense tensors by name; `layouts` has one entry per trunk layer.

    `tied` is False where the model has a head of its own though its config.json ties it, else None.
    """

    source: dict[str, str | None]
    policy: str
    norms: Norms
    quantisation: dict[str, Quantisation]
    layouts: tuple[RecordLayout | None, ...]
    mtp: bool
    mtp_layout: RecordLayout | None
    files: dict[str, FileEntry]
    copied: dict[str, Copied]
    tied: bool | None = None

    def to_text(self) -> str:
        """The manifest as JSON; equal manifests give equal bytes."""
        distinct = list(dict.fromkeys(x for x in (*self.layouts, self.mtp_layout) if x is not None))
        index = {layout: i for i, layout in enumerate(distinct)}
        data = {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "policy": self.policy,
            "norms": self.norms,
            **({} if self.tied is None else {"tied": self.tied}),
            "quantisation": {name: asdict(q) for name, q in self.quantisation.items()},
            "layouts": {
                "distinct": [layout.to_json() for layout in distinct],
                "trunk": [None if layout is None else index[layout] for layout in self.layouts],
                "mtp": None if self.mtp_layout is None else index[self.mtp_layout],
            },
            "mtp": self.mtp,
            "files": {name: {k: v for k, v in vars(e).items() if v is not None} for name, e in self.files.items()},
            "copied": {name: asdict(c) for name, c in self.copied.items()},
        }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
