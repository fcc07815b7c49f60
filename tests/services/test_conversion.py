"""Tests that GGUF files are converted once, and that directories of a model are read or refused."""

import errno
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bridge.errors import TokenizerNotUnderstood, UnusableModel
from services.engines import trial
from services.engines.registry import choose_engine
from services.engines.spec import EngineOptions
from services.engines.torch.model import load_model
from services.errors import DamagedFile
from services.model.host import load
from services.store import cache
from services.store.built_in import BUILT_IN
from services.store.cache import NoSpace, cache_directory, fingerprint
from services.store.convert import convert, ends
from services.store.files import read_model_files
from services.store.gguf import is_cut
from services.store.resolve import default_name, has_gguf, resolve, resolve_gguf
from services.store.tokenizer import read_vocabulary
from tests.support import gguf, tiny, warm

BUILT = BUILT_IN["gemma-3-270m"]


def ignore(text: str) -> None:
    pass


def converted(program: list[str], **options: object) -> SimpleNamespace:
    """Stands in for the process that converts, whose command is `program`."""
    directory = Path(program[-2])
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("new")
    return SimpleNamespace(returncode=0)


@pytest.fixture
def warm_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions run in processes that need not import torch and transformers first."""
    monkeypatch.setattr("services.store.resolve.subprocess.run", warm.run_bound)


@pytest.mark.parametrize("reference", [".", "..", "./", "tiny", "org/tiny", "./tiny.gguf", "~/tiny"])
def test_a_model_has_the_name_of_its_directory_or_file(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory := tmp_path / "tiny" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert default_name(reference) == "tiny"


@pytest.mark.parametrize("weights", ["float32", "bfloat16", ""])
def test_a_conversion_of_another_file_is_not_used(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of DraftBridge that has another file under a built-in model's name."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setattr("services.store.resolve.built_in_gguf", lambda model, report: Path(__file__))
    monkeypatch.setattr("services.store.resolve.subprocess.run", converted)
    directory = resolve(BUILT.name, weights=weights)
    for source, used in (("0" * 64, "new"), (BUILT.sha256, "old")):
        (directory / "gguf.sha256").write_text(source)
        (directory / "config.json").write_text("old")
        assert resolve(BUILT.name, weights=weights) == directory
        assert (directory / "config.json").read_text() == used


def test_a_conversion_is_not_bound_as_the_forwards_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def convert(program: list[str], *, env: dict[str, str], **options: object) -> SimpleNamespace:
        given.update(env)
        return converted(program)

    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_PLACES", "{0},{1}")
    monkeypatch.setattr("services.store.resolve.built_in_gguf", lambda model, report: Path(__file__))
    monkeypatch.setattr("services.store.resolve.subprocess.run", convert)
    resolve(BUILT.name)
    assert "PATH" in given and not {"OMP_PROC_BIND", "OMP_PLACES"} & set(given)


def test_of_two_that_need_a_conversion_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    monkeypatch.setattr("services.store.resolve.built_in_gguf", lambda model, report: Path(__file__))
    made, both = [], Barrier(2)

    def convert(program: list[str], **options: object) -> SimpleNamespace:
        made.append(program)
        with suppress(BrokenBarrierError):
            both.wait(0.5)  # for the other one, if it converts, too
        return converted(program)

    monkeypatch.setattr("services.store.resolve.subprocess.run", convert)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: resolve(BUILT.name), range(2)))
    assert found == [cache_directory() / BUILT.name] * 2 and len(made) == 1


@pytest.mark.parametrize(
    ("eos", "pad", "expected"),
    [("<|im_end|>", "<|endoftext|>", [2, 1]), ("<|im_end|>", "<|im_end|>", [2]), ("<|endoftext|>", None, [1])],
    ids=["Qwen", "SmolLM2", "GPT-2"],
)
def test_the_end_of_a_document_ends_a_text(eos: str, pad: str | None, expected: list[int]) -> None:
    words = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token=eos, pad_token=pad)
    assert ends(tokenizer) == expected


@pytest.mark.parametrize(("version", "keyword"), [("4.55.4", "torch_dtype"), ("4.56.0", "dtype"), ("5.23.0", "dtype")])
def test_the_data_type_is_named_as_the_library_names_it(
    version: str, keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **options: object) -> None:
        assert {name: value for name, value in options.items() if "dtype" in name} == {keyword: torch.bfloat16}
        raise InterruptedError

    # The module that is imported now: transformers replaces its own, and a test module may hold the one before.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    monkeypatch.setattr("gguf.GGUFReader", object)  # which is replaced
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stop)
    with pytest.raises(InterruptedError):
        convert(tmp_path / "model.gguf", tmp_path / "converted", "bfloat16")


def test_an_engine_that_reads_gguf_needs_no_converted_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    file, steps = tmp_path / "tiny.gguf", list[str]()
    gguf.write_qwen(file)
    small = resolve(str(file), steps.append, weights="")
    assert small == resolve(str(file), steps.append, weights="") and len(steps) == 1
    assert not list(small.glob("*.safetensors"))
    whole = resolve(str(file), steps.append)
    assert whole != small and list(whole.glob("*.safetensors"))
    assert "torchao" not in capfd.readouterr().err, "which warns its developers when transformers imports it"
    assert len({file.stat().st_mode for file in whole.iterdir()}) == 1, "other users of a cache can read all of it"
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
    shutil.rmtree(small)
    with pytest.raises(TokenizerNotUnderstood, match=f"^{whole}/tokenizer.json: it is damaged"):
        read_vocabulary(str(file))
    (whole / "tokenizer.json").unlink()
    with pytest.raises(UnusableModel, match="delete it and run the same command again"):
        resolve(str(file))


@pytest.mark.usefixtures("warm_conversion")
def test_a_gguf_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    file, other = tmp_path / f"sha256-{'0123' * 60}", tmp_path / "sha256-4567"
    gguf.write_qwen(file)
    other.write_bytes(b"a license")
    assert has_gguf(str(file)) and resolve_gguf(str(file)) == file
    assert not has_gguf(str(other))
    assert read_vocabulary(str(file)).size == 260
    assert trial._files(file) == [file]
    assert trial._files(other) == [file, other], "beside the file of a converted model lie its weights"


@pytest.mark.usefixtures("warm_conversion")
def test_weights_are_stored_in_bfloat16_for_an_engine_that_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what such an engine makes of those in float32, which serve it, too."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    gguf.write_qwen(file := tmp_path / "tiny.gguf")
    half = resolve(str(file), ignore, weights="bfloat16")
    assert resolve(str(file), pytest.fail, weights="") == half, "it has the tokenizer"
    whole = resolve(str(file), ignore, weights="float32")
    assert resolve(str(file), pytest.fail, weights="bfloat16") == half != whole
    kept, exact = (load_file(one / "model.safetensors") for one in (half, whole))
    assert kept.keys() == exact.keys() and {one.dtype for one in exact.values()} == {torch.float32}
    assert all(torch.equal(kept[name], exact[name].to(torch.bfloat16)) for name in exact)
    assert fingerprint(half) == fingerprint(whole), "both are of one file"
    shutil.rmtree(half)
    assert resolve(str(file), pytest.fail, weights="bfloat16") == whole


@pytest.mark.usefixtures("warm_conversion")
@pytest.mark.parametrize("weights", ["float32", "bfloat16", ""])
def test_a_cut_file_is_called_that(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    gguf.write_qwen(file)
    assert not is_cut(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DamagedFile, match=rf"{file} is damaged or incomplete, because it ends before its last tensor"):
        resolve(str(file), ignore, weights=weights)
    assert "failed" not in capfd.readouterr().err


def test_a_directory_with_a_gguf_file_names_it(tmp_path: Path) -> None:
    gguf.write_qwen(tmp_path / "tiny.gguf")
    with pytest.raises(
        UnusableModel, match=r"has 1 GGUF files, and an engine reads one: name it, such as .*/tiny.gguf"
    ):
        resolve(str(tmp_path), ignore)


@pytest.mark.usefixtures("warm_conversion")
def test_a_file_of_an_unknown_architecture_is_read_once_for_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    gguf.write_qwen(file := tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"qwenX"))
    options, lines = EngineOptions(device="cpu"), list[str]()
    with pytest.raises(UnusableModel, match=r"tiny\.gguf could not be converted.*: give a directory that"):
        choose_engine("auto", str(file), options, partial(trial.fastest, report=lines.append))
    assert len(lines) == 1 and "reading the tokenizer of tiny" in lines[0]
    assert "qwenX is not supported" in capfd.readouterr().err


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json("byte_level"))
    size = tiny.vocabulary("byte_level").size
    small = replace(tiny.model("byte_level"), vocabulary_size=size // 2)
    with pytest.raises(UnusableModel, match=rf"tokenizer.json is of another model: {size - size // 2} of its tokens"):
        load(tmp_path, "small", lambda: tiny.HashEngine(small))


@pytest.mark.parametrize("nested", [False, True])
def test_a_tokenizer_that_does_not_fit_the_configuration_is_refused_before_the_weights_are_read(
    nested: bool, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json("byte_level"))
    size = tiny.vocabulary("byte_level").size
    stated = {"vocab_size": size // 2}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size, "text_config": stated} if nested else stated))
    with pytest.raises(UnusableModel, match=rf"vocabulary of {size // 2} by its config.json. Put the model's own"):
        load(tmp_path, "small", lambda: pytest.fail("the weights are read"))


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
        resolve(str(tmp_path), weights="")
    (tmp_path / "model.gguf").write_bytes(b"GGUF one")
    assert resolve(str(tmp_path), weights="") == tmp_path
    with pytest.raises(UnusableModel, match="name it, such as"):
        resolve(str(tmp_path))
    first = fingerprint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF two")
    assert fingerprint(tmp_path) != first


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_a_file_that_this_user_may_not_read_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / one).write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(tiny.tokenizer_json("byte_level"))
    hide(tmp_path / name, monkeypatch)
    with pytest.raises(UnusableModel, match=rf"/{name} cannot be read \(Permission denied\): let this user read it"):
        read_model_files(tmp_path)


def test_a_directory_or_gguf_file_that_this_user_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    (directory := tmp_path / "model").mkdir()
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    hide(directory / "config.json", monkeypatch, "is_file")
    with pytest.raises(UnusableModel, match=r"config\.json cannot be read \(Permission denied\)"):
        resolve(str(directory))
    hide(file, monkeypatch)
    with pytest.raises(UnusableModel, match=r"model\.gguf cannot be read \(Permission denied\)"):
        resolve(str(file))
    kept = cache_directory() / f"{BUILT.name}.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"GGUF")
    hide(kept, monkeypatch)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as in a container
    with pytest.raises(UnusableModel, match=rf"{BUILT.name}\.gguf cannot be read \(Permission denied\)"):
        resolve(BUILT.name, weights="")


def hide(hidden: Path, monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Makes a file unreadable for these methods of its path: permissions do not keep root from reading."""
    for method in methods or ("open", "read_bytes", "read_text"):
        usual = getattr(Path, method)

        def refuse(path: Path, *arguments: object, usual: Any = usual, **options: object) -> object:
            if path == hidden:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return usual(path, *arguments, **options)

        monkeypatch.setattr(Path, method, refuse)


@pytest.mark.parametrize(("weights", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("spare", [-1, 1], ids=["too little", "enough"])
def test_room_for_converted_weights_is_checked_before(
    spare: int, weights: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound by the file's size is far above what the weights need, so the metadata decides."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_FULL_BYTES", 0)
    gguf.write_qwen(file := tmp_path / "tiny.gguf")
    needed = size * (2 * 260 * 8 + 2 * 8 + 8 + 2 * 64 + 2 * 32 + 2 * 4 + 8 + 3 * 128)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed + spare))
    if spare > 0:
        monkeypatch.setattr("services.store.resolve.subprocess.run", converted)
        assert list(resolve(str(file), weights=weights).glob("*.safetensors"))
        return
    with pytest.raises(NoSpace) as caught:
        resolve(str(file), weights=weights)
    assert caught.value.metadata["needed_bytes"] == str(needed)
    assert not [one for one in cache_directory().iterdir() if one.is_dir() and one.name != ".partial"]
