"""Keeps what the bridge has learned about pairs in an SQLite file, so that it survives a restart."""

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple, fields
from itertools import count
from math import inf
from pathlib import Path
from threading import Semaphore
from time import monotonic, sleep, time
from typing import Any

from services.bridge.draft_choice import FADE, PairRecord, RecordKey

_log = logging.getLogger(__name__)

# The version of the tables and the mark of our files, kept in SQLite's own `user_version` and `application_id`.
_VERSION, _APPLICATION_ID = 1, 0x44425052
_KEY_COLUMNS, _COLUMNS = ["target", "draft", "workload"], [field.name for field in fields(PairRecord)]
_ALL_COLUMNS = [*_KEY_COLUMNS, *_COLUMNS, "updated"]
# Adds a request to a row as `PairRecord.add` does. Several processes may write to one file.
_WRITE = (
    f"INSERT INTO pair_record ({', '.join(_ALL_COLUMNS)}) VALUES ({', '.join('?' * len(_ALL_COLUMNS))}) "
    f"ON CONFLICT ({', '.join(_KEY_COLUMNS)}) DO UPDATE SET updated = excluded.updated, "
    + ", ".join(f"{name} = {FADE} * {name} + excluded.{name}" for name in _COLUMNS)
)
# Rows to keep: those that were updated last; and the requests after which the others are removed.
_MAX_ROWS, _TRIM_REQUESTS = 4096, 256
_TRIM = "DELETE FROM pair_record WHERE rowid NOT IN (SELECT rowid FROM pair_record ORDER BY updated DESC LIMIT ?)"
# How long to wait for another process that writes the file, and the most writes that wait meanwhile.
_LOCKED_SECONDS, _RETRY_SECONDS, _MAX_WAITING = 5.0, 0.05, 1000


class _ForeignFile(Exception):
    """The file is a valid database, but not one of pairs."""


class PairMemory:
    """A file of records. Writing never delays a request; an error of the disk costs what was learned, nothing else.

    Several bridges may write to one file: each adds its requests, and reads those of the others at its start.

    A file that is broken, or was written by a newer version, is kept under another name. A file that is locked, cannot
    be opened, or belongs to another program is left alone; then what was learned is forgotten at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = ThreadPoolExecutor(1, "pair memory")
        self._database: sqlite3.Connection | None = None
        self._failed, self._written_count = False, 0
        # Room for writes that wait, and the time after which none is made any more.
        self._room, self._end = Semaphore(_MAX_WAITING), inf
        self.records: dict[RecordKey, PairRecord] = {}
        try:
            self.records = self._open()
        except (sqlite3.OperationalError, OSError, _ForeignFile) as error:
            self._go_without(error)
        except (sqlite3.DatabaseError, ValueError) as error:
            self._set_aside(error)

    def add(self, key: RecordKey, request: PairRecord) -> None:
        """Adds a request to a record soon, in the order of the calls; not while too many wait for a locked file."""
        if self._room.acquire(blocking=False):
            self._submit(self._write, key, astuple(request))

    def close(self) -> None:
        """Writes what is still to be written, for some seconds at most, and closes the file."""
        self._end = monotonic() + _LOCKED_SECONDS
        if self._database:
            self._submit(self._database.close)
        self._writer.shutdown()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self._writer.submit(self._guarded, function, *arguments)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except sqlite3.Error as error:
            if not self._failed:  # once: a full disk fails for every request
                _log.warning("%s cannot be written (%s): what the bridge learns is lost at its end", self._path, error)
            self._failed = True

    def _open(self) -> dict[RecordKey, PairRecord]:
        """Opens the file, and returns its records, those updated last at the end. Waits while it is locked."""
        until = monotonic() + _LOCKED_SECONDS
        while True:
            try:
                return self._open_now()
            except sqlite3.OperationalError as error:
                # SQLite does not wait itself if two processes turn a new file into a WAL database at the same time.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() >= until:
                    raise
            sleep(_RETRY_SECONDS)

    def _open_now(self) -> dict[RecordKey, PairRecord]:
        """Opens the file, creates its table if it is new, and returns its records."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size:
            self._check()
        # Opened here, used by the writer's thread from then on.
        database = sqlite3.connect(self._path, timeout=_LOCKED_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # Marked before anything else, so that its header shows whose file it is.
            database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            columns = ", ".join(f"{name} REAL NOT NULL" for name in _COLUMNS)
            database.execute(
                "CREATE TABLE IF NOT EXISTS pair_record (target TEXT, draft TEXT, workload TEXT, "
                f"{columns}, updated REAL NOT NULL, PRIMARY KEY (target, draft, workload))"
            )
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute(_TRIM, (_MAX_ROWS,))
            with closing(
                database.execute(
                    f"SELECT target, draft, workload, {', '.join(_COLUMNS)} FROM pair_record ORDER BY updated"
                )
            ) as rows:
                found = {RecordKey(*row[:3]): PairRecord(*map(float, row[3:])) for row in rows}
        except BaseException:
            database.close()
            raise
        self._database = database
        return found

    def _check(self) -> None:
        """Reads whose file it is, without changing it. Raises `_ForeignFile`, or `ValueError` for one to set aside."""
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, timeout=_LOCKED_SECONDS, uri=True)) as database:
            (mark,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            columns = [row[1] for row in database.execute("PRAGMA table_info (pair_record)")]
        if mark != _APPLICATION_ID and (mark, version, columns, tables) != (0, 1, _ALL_COLUMNS, ["pair_record"]):
            raise _ForeignFile("it is the database of another program: give another --pair-memory")
        if version not in (0, _VERSION):
            raise ValueError(f"it has version {version}, this software writes version {_VERSION}")
        if columns not in ([], _ALL_COLUMNS):
            raise ValueError(f"its records have the columns {', '.join(columns)}")

    def _write(self, key: RecordKey, values: tuple[float, ...]) -> None:
        self._room.release()
        if self._database and monotonic() < self._end:
            self._database.execute(_WRITE, (*key, *values, time()))
            self._written_count += 1
            if self._written_count % _TRIM_REQUESTS == 0:
                self._database.execute(_TRIM, (_MAX_ROWS,))

    def _set_aside(self, error: Exception) -> None:
        """Renames an unreadable file, never over another one, and begins a new one."""
        try:
            kept = next(path for number in count(1) if not (path := _numbered(self._path, number)).exists())
            for suffix in ("", "-wal", "-shm"):
                part = self._path.with_name(self._path.name + suffix)
                if part.exists():
                    part.rename(kept.with_name(kept.name + suffix))
            self._open()
            _log.warning("%s cannot be read (%s): it was kept as %s, and a new file begun", self._path, error, kept)
        except (sqlite3.Error, OSError) as second:
            self._go_without(second)

    def _go_without(self, error: Exception) -> None:
        _log.warning("%s cannot be used (%s): what the bridge learns is lost at its end", self._path, error)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.unreadable-{number}")
