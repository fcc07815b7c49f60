"""Tests scratch directories of the cache, and what is downloaded and read of models elsewhere."""

import errno
import os
from pathlib import Path

import pytest

from bridge.errors import UnusableModel
from services.engines.registry import engine_spec
from services.engines.spec import EngineOptions
from services.store.cache import NoSpace, cache_directory, scratch_directory
from services.store.files import _chat_template
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
