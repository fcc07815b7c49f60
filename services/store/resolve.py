"""Finds models: turns what a user names into files that engines read.

A name is a built-in model, a directory, a GGUF file or a Hugging Face id. What has to be fetched or converted is done
once and kept in the cache (`services.store.cache`).
"""

import contextlib
import subprocess
import sys
from pathlib import Path

from bridge.errors import ModelNotFound, UnusableModel
from bridge.text.vocabulary import Vocabulary
from services.store.built_in import BUILT_IN, BuiltIn, built_in_gguf, check_gguf
from services.store.cache import Report, cache_directory, scratch_directory, settle

# The draft that has no model and no files; see `services.model.draft.suffix`.
SUFFIX = "suffix"
_REMEDY = f"give a directory, a GGUF file, a Hugging Face id, or one of {', '.join(BUILT_IN)}"


def default_name(reference: str) -> str:
    """The name that a model is served under if none is given."""
    path = Path(reference)
    return path.stem if path.suffix == ".gguf" else path.name or reference


def resolve(reference: str, report: Report = lambda text: None) -> Path:
    """A directory with config, weights and tokenizer for what `reference` names.

    `report` is told each step in words. Raises `ModelNotFound`, `UnusableModel` or `ChecksumMismatch`.
    """
    if not reference:
        raise ModelNotFound(f"no model was named: {_REMEDY}", model="")
    if reference == SUFFIX:
        raise UnusableModel(
            f"{SUFFIX} is no model but a draft without one: serve it with --role draft", model=reference
        )
    if reference in BUILT_IN:
        return _built_in(BUILT_IN[reference], report)
    try:
        path = Path(reference).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user that does not exist
        raise ModelNotFound(f"there is no model at {reference[:200]} ({error}): {_REMEDY}") from error
    if is_directory:
        return _directory(path)
    if is_file:
        return _gguf(path, path.stem, None, report)
    if path.suffix == ".gguf" or path.is_absolute() or reference.startswith((".", "~")):
        raise ModelNotFound(
            f"there is no model at {reference}: {_REMEDY}",
            model=reference,
        )
    return _from_hub(reference, report)


def read_vocabulary(reference: str, report: Report = lambda text: None) -> Vocabulary:
    """The tokenizer of what `reference` names: anything that `resolve` takes, or a `tokenizer.json` by itself.

    Raises what `resolve` raises, or `TokenizerNotUnderstood`.
    """
    path = Path(reference)
    with contextlib.suppress(OSError, ValueError):  # a name too long is none of a file
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.suffix == ".json" and file.is_file():
            return Vocabulary(file.read_bytes())
    return Vocabulary((resolve(reference, report) / "tokenizer.json").read_bytes())


def _directory(path: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not (any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))):
        missing.append("*.safetensors")
    if missing:
        raise UnusableModel(
            f"{path} is no model directory, it lacks {', '.join(missing)}: save model and fast tokenizer "
            "there with save_pretrained",
            model=path,
        )
    return path


def _kept(path: Path) -> Path:
    """A directory of the cache; only complete ones get there, but anybody may have been at it since."""
    try:
        return _directory(path)
    except UnusableModel as error:
        raise UnusableModel(f"{path} is damaged: delete it and run the same command again", model=path) from error


def _from_hub(reference: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    report(f"fetching {reference} from the Hugging Face hub")
    try:
        found = snapshot_download(reference, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(f"nobody knows a model {reference!r}: {_REMEDY}", model=reference) from error
    except Exception as error:  # offline, refused, timed out: the library has many words for it
        raise ModelNotFound(
            f"{reference!r} is no built-in model and no file here, and the Hugging Face hub was not reached "
            f"({type(error).__name__}): {_REMEDY}",
            model=reference,
        ) from error
    return _directory(Path(found))


def has_gguf(reference: str) -> bool:
    """Whether `resolve_gguf` finds a file for it."""
    try:
        return reference in BUILT_IN or bool(resolve_gguf(reference))
    except UnusableModel:
        return False


def resolve_gguf(reference: str, report: Report = lambda text: None) -> Path:
    """The GGUF file of what `reference` names: a built-in name, such a file, or a directory with one in it.

    Raises `UnusableModel` where there is none, and what `resolve` raises.
    """
    if reference in BUILT_IN:
        return built_in_gguf(BUILT_IN[reference], report)
    try:
        path = Path(reference).expanduser()
        found = [path] if path.is_file() and path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    except (OSError, RuntimeError, ValueError):  # a name too long, a user that does not exist
        found = []
    if len(found) != 1:
        raise UnusableModel(
            f"{reference} has {len(found)} GGUF files, and the llamacpp engine runs one: name the file, or one of "
            f"{', '.join(BUILT_IN)}, or use --engine torch",
            model=reference,
        )
    return found[0]


def _built_in(model: BuiltIn, report: Report) -> Path:
    final = cache_directory() / model.name
    if final.exists():
        return _kept(final)
    return _gguf(built_in_gguf(model, report), model.name, model.sha256, report)


def _gguf(path: Path, name: str, sha256: str | None, report: Report) -> Path:
    """The converted model of a GGUF file, from the cache if it was converted before."""
    digest = check_gguf(path, sha256)
    final = cache_directory() / (name if sha256 else f"{name}-{digest[:12]}")
    if final.exists():
        return _kept(final)
    report(f"converting {name} (once)")
    with scratch_directory() as scratch:
        converted = scratch / "converted"
        # A process of its own: conversion takes several times the model's memory.
        done = subprocess.run(
            [sys.executable, "-m", "services.store.convert", str(path), str(converted)],
            stdout=sys.stderr,
            check=False,
        )
        if done.returncode:
            raise UnusableModel(
                f"{path.name} could not be converted: see the message above. The file may be damaged, or of an "
                "architecture that transformers does not read from GGUF; a directory from save_pretrained works too",
                model=path,
            )
        settle(converted, final)
    return final
