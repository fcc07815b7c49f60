"""What the bridge learns about pairs survives a restart; an unreadable file is kept."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from time import monotonic

import pytest

from services.bridge import pair_memory
from services.bridge.draft_choice import PairRecord, RecordKey
from services.bridge.pair_memory import PairMemory

KEY = RecordKey("target|1", "draft|2", "code")
RECORD = PairRecord(3.0, 200.0, 100.0, 90.0, 120.0, 60.0, 240.0)


def remember(path: Path, key: RecordKey = KEY, record: PairRecord = RECORD) -> None:
    memory = PairMemory(path)
    memory.add(key, record)
    memory.close()


def recall(path: Path) -> dict[RecordKey, PairRecord]:
    memory = PairMemory(path)
    memory.close()
    return memory.records


def test_records_survive_and_requests_of_several_bridges_add_up(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pairs.sqlite"
    other = PairMemory(path)
    remember(path)
    other.add(KEY, RECORD)
    other.close()
    remember(path, KEY._replace(workload=""))
    both = replace(RECORD)
    both.add(RECORD)
    found = recall(path)
    assert set(found) == {KEY, KEY._replace(workload="")}
    assert astuple(found[KEY]) == pytest.approx(astuple(both))


@pytest.mark.parametrize(
    "content", [b"this is not a database" * 100, b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 4000]
)
def test_an_unreadable_file_is_kept_aside_and_never_overwritten(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.sqlite"
    for number in (1, 2):
        path.write_bytes(content)
        remember(path)
        assert (tmp_path / f"pairs.sqlite.unreadable-{number}").read_bytes() == content
        assert f"unreadable-{number}" in caplog.text
        assert recall(path) == {KEY: RECORD}


def test_a_file_of_a_newer_version_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "pairs.sqlite"
    remember(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    remember(path)
    assert recall(path) == {KEY: RECORD}
    kept = sqlite3.connect(tmp_path / "pairs.sqlite.unreadable-1")
    assert kept.execute("PRAGMA user_version").fetchone() == (99,)
    kept.close()


def test_a_directory_in_its_place_costs_the_memory_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "file"
    place.write_text("not a directory")
    memory = PairMemory(place / "pairs.sqlite")
    memory.add(KEY, RECORD)
    memory.close()
    assert memory.records == {} and place.read_text() == "not a directory"
    assert "cannot be used" in caplog.text


def test_a_file_that_cannot_be_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pair_memory, "sleep", lambda seconds: pytest.fail("it waits"))
    remember(tmp_path)
    assert "cannot be used" in caplog.text


def test_an_unreadable_file_that_cannot_be_renamed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rename(*names: Path) -> None:
        raise PermissionError("the directory is read-only")

    path = tmp_path / "pairs.sqlite"
    path.write_text("not a database" * 100)
    monkeypatch.setattr(Path, "rename", rename)
    remember(path)
    assert "cannot be used" in caplog.text and path.read_text() == "not a database" * 100


@pytest.mark.parametrize("version", [0, 1, 77])
def test_the_database_of_another_program_is_left_alone(
    tmp_path: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mail.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mail (text TEXT)")
    other.execute(f"PRAGMA user_version = {version}")
    other.close()
    before = path.read_bytes()
    remember(path)
    assert "another program" in caplog.text
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_the_first_version_without_a_mark_is_read_and_other_columns_are_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "pairs.sqlite"
    remember(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA application_id = 0")
    database.close()
    assert recall(path) == {KEY: RECORD}
    database = sqlite3.connect(path)
    database.execute("ALTER TABLE pair_record DROP COLUMN updated")
    database.close()
    remember(path, KEY._replace(workload="new"))
    assert recall(path) == {KEY._replace(workload="new"): RECORD}
    assert (tmp_path / "pairs.sqlite.unreadable-1").exists()


def test_a_file_that_another_process_has_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.sqlite"
    remember(path)
    monkeypatch.setattr(pair_memory, "_LOCKED_SECONDS", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    memory = PairMemory(path)
    memory.close()
    other.execute("ROLLBACK")
    other.close()
    assert memory.records == {} and "cannot be used" in caplog.text
    assert recall(path) == {KEY: RECORD}


def test_a_file_that_stays_locked_holds_up_neither_requests_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.sqlite"
    monkeypatch.setattr(pair_memory, "_LOCKED_SECONDS", 0.2)
    monkeypatch.setattr(pair_memory, "_MAX_WAITING", 50)
    memory = PairMemory(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(200):
            memory.add(KEY, RECORD)
        assert memory._writer._work_queue.qsize() <= 50
        began = monotonic()
        memory.close()
        assert monotonic() - began < 5, "50 writes would take 10 s"
    assert "cannot be written" in caplog.text and recall(path) == {}


def test_a_file_that_is_locked_for_a_moment_is_waited_for_also_where_sqlite_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect = tmp_path / "pairs.sqlite", sqlite3.connect
    remember(path)
    other = connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(sqlite3, "connect", lambda place, **options: connect(place, **options | {"timeout": 0}))
    timer = threading.Timer(0.1, other.close)
    timer.start()
    assert recall(path) == {KEY: RECORD}
    timer.join()


def test_a_file_that_stays_open_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_memory, "_MAX_ROWS", 3)
    monkeypatch.setattr(pair_memory, "_TRIM_REQUESTS", 4)
    memory = PairMemory(tmp_path / "pairs.sqlite")
    for number in range(8):
        memory.add(KEY._replace(workload=str(number)), RECORD)
    memory.close()
    with closing(sqlite3.connect(tmp_path / "pairs.sqlite")) as database:
        rows = database.execute("SELECT workload FROM pair_record ORDER BY workload").fetchall()
    assert rows == [("5",), ("6",), ("7",)]
