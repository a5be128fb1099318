"""The working directory of a conversion: which files are complete, so that the same call resumes after any stop."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from ..errors import ConversionError
from .manifest import FileEntry
from .plan import Plan
from .writer import sync_directory

JOURNAL, STORE, SOURCE, IDENTITY, LOCK = "journal", "store", "source", "identity", "lock"


class Journal:
    """`root`/store grows into the store, `root`/journal notes each durable file, `root`/source is for downloads.

    One process at a time.
    """

    def __init__(self, root: Path):
        self.root, self.store, self.notes, self.source = root, root / STORE, root / JOURNAL, root / SOURCE

    def __enter__(self) -> Journal:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.root / LOCK, "w")
        except OSError as failure:
            raise ConversionError(f"{self.root} cannot be written: {failure.strerror}.") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise ConversionError(
                f"Another conversion is at work in {self.root}; wait for it or give another name."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if not any(self.notes.glob("*.json")) and not self.source.exists():
            shutil.rmtree(self.root, ignore_errors=True)
        self.lock.close()

    def resume(self, identity: str, plan: Plan) -> dict[str, FileEntry]:
        """The files that an earlier run of this conversion completed; leftovers of another are removed."""
        noted = self.root / IDENTITY
        if not noted.is_file() or noted.read_text() != identity:
            for folder in (self.store, self.notes):
                shutil.rmtree(folder, ignore_errors=True)
            noted.unlink(missing_ok=True)
        self.store.mkdir(exist_ok=True)
        self.notes.mkdir(exist_ok=True)
        self._write(noted, identity)
        done = {}
        for name, file in plan.files.items():
            note, written = self._note(name), self.store / name
            if note.is_file() and written.is_file() and written.stat().st_size == file.header.file_bytes:
                done[name] = FileEntry(**json.loads(note.read_text()))
        return done

    def record(self, name: str, entry: FileEntry) -> None:
        """Note that a file is complete and on the disk."""
        self._write(self._note(name), json.dumps(vars(entry)))

    def publish(self, target: Path) -> None:
        """Give the finished store its name and remove the journal."""
        for folder in {self.store, *(p.parent for p in self.store.rglob("*"))}:
            sync_directory(folder)
        os.rename(self.store, target)
        try:
            sync_directory(target.parent)
        except OSError:
            os.rename(target, self.store)
            raise
        shutil.rmtree(self.root, ignore_errors=True)

    def _note(self, name: str) -> Path:
        return self.notes / (name.replace("/", "--") + ".json")

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_suffix(".draft")
        with open(draft, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
