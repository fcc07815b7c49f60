"""Tests the cache's scratch directories and checksums, and what is downloaded and read of models elsewhere."""

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest

from bridge.errors import UnusableModel
from services.engines.registry import engine_spec
from services.engines.spec import EngineOptions
from services.store.cache import NoSpace, cache_directory, scratch_directory
from services.store.files import _chat_template
from services.store.gguf import remembered_sha256
from services.store.resolve import resolve
from services.store.tokenizer import read_vocabulary
from tests.support import tiny


def ignore(text: str) -> None:
    pass


def test_a_file_that_does_not_fit_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    with pytest.raises(NoSpace, match="free some"), scratch_directory():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InterruptedError), scratch_directory():
        raise OSError(errno.EINTR, "another fault")
    assert not list(cache_directory().iterdir())


def test_what_a_killed_process_left_is_deleted_and_what_a_running_one_writes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    (left := tmp_path / "models" / ".scratch-left").mkdir(parents=True)
    (left / "model.safetensors").touch()
    with scratch_directory() as running:
        assert left.is_dir(), "it may have been made just now"
        for directory in (left, running):
            os.utime(directory, (1, 1))
        with scratch_directory() as other:
            assert running.is_dir() and other.is_dir() and not left.exists()
    assert not running.exists()


def test_a_file_is_read_once_for_its_checksum_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    read = list[str]()

    def check_gguf(path: Path) -> str:
        read.append(path.read_text())
        return sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("services.store.gguf.check_gguf", check_gguf)
    monkeypatch.setattr("services.store.gguf._RECENT_SECONDS", -1.0)
    file = tmp_path / "mine.gguf"

    def write(content: str, seconds: int) -> None:
        """Writes the file with a time, and checks the SHA-256 that two processes get."""
        changed_ns = file.stat().st_ctime_ns if file.exists() else 0
        # Some kernels count this time in steps of milliseconds.
        while not file.exists() or file.stat().st_ctime_ns == changed_ns:
            file.write_text(content)
            os.utime(file, (seconds, seconds))
        assert [remembered_sha256(file) for _ in range(2)] == [sha256(content.encode()).hexdigest()] * 2

    write("GGUF1", 1)
    monkeypatch.chdir(tmp_path)
    remembered_sha256(Path("mine.gguf"))
    assert read == ["GGUF1"], "by any path"
    write("GGUF2", 1)
    assert len(read) == 2, "one of the same size that was given the time of the other"
    with monkeypatch.context() as patch:
        patch.setattr("services.store.gguf._RECENT_SECONDS", 3600.0)
        write("GGUF3", 1)
    assert read[2:] == ["GGUF3", "GGUF3"], "one that may still be written"
    write("GGUF3", 1)
    for note in (tmp_path / "gguf").iterdir():
        note.write_text("[]")
    remembered_sha256(file)
    assert len(read) == 6


def test_a_checksum_that_cannot_be_remembered_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "mine.gguf").write_text("GGUF")
    os.utime(file, (1, 1))
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(file))  # which is not a directory
    assert remembered_sha256(file) == remembered_sha256(file) == sha256(b"GGUF").hexdigest()


def test_only_the_tokenizer_of_a_model_of_the_hub_is_downloaded_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json("byte_level"))
    asked: list[str] = []

    def snapshot_download(reference: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_vocabulary("us/model", ignore).size == tiny.vocabulary("byte_level").size
    assert asked == ["config.json", "tokenizer.json"]
    with pytest.raises(UnusableModel, match=r"lacks \*\.safetensors"):  # which a server needs
        resolve("us/model", ignore, weights="")
    assert "*.safetensors" in asked


@pytest.mark.parametrize("engine", ["torch", "habana"])
def test_a_model_of_the_hub_that_may_run_code_is_refused_before_it_is_downloaded(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(reference: str, **options: object) -> str:
        pytest.fail("downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UnusableModel, match=r"hf download us/model --local-dir .*check its code.*--trust-model"):
        engine_spec(engine).prepare("us/model", EngineOptions(trusted=True), ignore)


def test_a_chat_template_that_is_no_text_is_refused_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes("{{ '▁' }}".encode())
    assert _chat_template(tmp_path, {}) == "{{ '▁' }}"
    file.write_bytes(b"{{ '\xff' }}")
    with pytest.raises(UnusableModel, match=r"chat_template\.jinja is not UTF-8"):
        _chat_template(tmp_path, {})
