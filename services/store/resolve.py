"""Resolves a model reference to files that engines read.

A reference is the name of a built-in model, a directory, a GGUF file or a Hugging Face id. Models that are downloaded
or converted are kept in a cache: the hub's own models in that of its library, others in `services.store.cache`.

    python -m services.store.resolve REFERENCE

downloads a model, and converts none of its weights.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bridge.errors import UnusableModel
from services.child import bound_command, environment_before
from services.errors import DamagedFile, ModelNotFound
from services.interrupts import ending_at_once
from services.store.built_in import BUILT_IN, SUFFIX, BuiltIn
from services.store.cache import (
    CacheUnusable,
    NoSpace,
    Report,
    cache_directory,
    check_space,
    making,
    name_revision,
    reading,
    settle,
    shortened,
    source_of,
    writing,
)
from services.store.download import built_in_gguf, held_bytes
from services.store.gguf import CUT_STATUS, is_gguf, reader, remembered_sha256

# What is kept of a GGUF file, by the data type of its weights ("" for none): the end of the directory's name in the
# cache, and the bytes of a weight. float32 represents every value of the file, and what holds it serves for all others.
_KEPT = {"float32": ("", 4), "bfloat16": (".bfloat16", 2), "": (".tokenizer", 0)}
# The fewest bits of a weight in a GGUF file, and in those of the built-in models on average.
_FEWEST_BITS, _BUILT_IN_BITS = 1.56, 4.85
_REMEDY = f"give a directory, a GGUF file, a Hugging Face id, or one of {', '.join(BUILT_IN)}"


def default_name(reference: str) -> str:
    """Returns the name that a model is served under by default."""
    path = Path(os.path.abspath(reference))  # "." has no name
    return path.stem if path.suffix == ".gguf" else path.name or reference


def resolve(
    reference: str,
    report: Report = lambda text: None,
    *,
    weights: str = "float32",
    only_tokenizer: bool = False,
    trusted: bool = False,
) -> Path:
    """Returns a directory with configuration, weights and tokenizer. Downloads and converts the model if needed.

    `weights`: the data type, float32 or bfloat16, that those of a GGUF file are converted to; "" to convert none.
    `only_tokenizer`, with that: only the configuration and the tokenizer of a model of the hub are downloaded.
    `trusted`: the model may run code, which is never downloaded here: nobody would have read it before it runs.
    Raises `ModelNotFound`, `UnusableModel`, `DamagedFile`, `ChecksumMismatch`, `CacheUnusable` or `NoSpace`.
    """
    if not reference:
        raise ModelNotFound(f"no model was named: {_REMEDY}", model="")
    if reference == SUFFIX:
        raise UnusableModel(
            f"{SUFFIX} is prompt lookup, a draft without a model: serve it with --role draft", model=reference
        )
    if reference in BUILT_IN:
        return _built_in(BUILT_IN[reference], weights, report)
    try:
        path = Path(reference).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # such as a name too long, or ~ of an unknown user
        raise ModelNotFound(f"there is no model at {reference[:200]} ({error}): {_REMEDY}") from error
    if is_directory:
        with reading(path):
            return _directory(path, bool(weights) or not any(path.glob("*.gguf")))
    if is_file:
        return _gguf(path, path.stem, None, weights, report)
    if path.suffix == ".gguf" or path.is_absolute() or reference.startswith((".", "~")):
        raise ModelNotFound(
            f"there is no model at {reference}: {_REMEDY}",
            model=reference,
        )
    if trusted:
        raise UnusableModel(
            f"--trust-model is for directories, and there is none at {reference}: if that is a Hugging Face id, "
            f"download it to a directory first (hf download {reference} --local-dir DIRECTORY), check its code, then "
            "serve the directory with --trust-model",
            model=reference,
        )
    return _from_hub(reference, report, only_tokenizer)


def _directory(path: Path, weights: bool = True) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if weights and not (any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))):
        missing.append("*.safetensors")
    if missing and (files := sorted(path.glob("*.gguf"))):
        raise UnusableModel(
            f"{path} has {len(files)} GGUF files, and an engine reads one: name it, such as {files[0]}",
            model=path,
        )
    if missing:
        raise UnusableModel(
            f"{path} is not a model directory: it lacks {', '.join(missing)}. Save the model and its fast tokenizer "
            "there with save_pretrained",
            model=path,
        )
    return path


def _kept(path: Path, weights: bool) -> Path:
    """Returns a directory of the cache. Raises `UnusableModel` if files were deleted since it was put there."""
    try:
        return _directory(path, weights)
    except UnusableModel as error:
        raise UnusableModel(f"{path} is damaged: delete it and run the same command again", model=path) from error


def _from_hub(reference: str, report: Report, only_tokenizer: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    report(f"fetching {'the tokenizer of ' * only_tokenizer}{reference} from the Hugging Face hub")
    whole = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        # The library waits for its threads, which may download for hours; the next run goes on where they ended.
        with writing(Path(constants.HF_HUB_CACHE), "the download"), ending_at_once():
            found = snapshot_download(
                reference,
                allow_patterns=["config.json", "tokenizer.json"] if only_tokenizer else whole,
                # The same weights in another layout, and parts of other programs.
                ignore_patterns=["consolidated*", "onnx/*", "original/*"],
            )
    except (CacheUnusable, NoSpace):
        raise
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{reference} is only for users who accepted its license: accept it at https://huggingface.co/{reference}, "
            "and set HF_TOKEN in the environment",
            model=reference,
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(f"there is no model {reference!r} on the hub: {_REMEDY}", model=reference) from error
    except Exception as error:  # offline, refused or timed out: the library raises errors of many types
        raise ModelNotFound(
            f"{reference!r} is neither a built-in model nor a local file, and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}): {_REMEDY}",
            model=reference,
        ) from error
    try:
        return _directory(Path(found), not only_tokenizer)
    except UnusableModel as error:  # offline, the library returns what it has, such as a tokenizer alone
        remedy = "if the hub has the rest, run the same command with a connection to it"
        raise UnusableModel(f"{error}; {remedy}", model=reference) from error


def has_gguf(reference: str) -> bool:
    """Returns whether `resolve_gguf` finds a file for the reference. Downloads nothing."""
    try:
        return reference in BUILT_IN or bool(resolve_gguf(reference))
    except UnusableModel:
        return False


def resolve_gguf(reference: str, report: Report = lambda text: None) -> Path:
    """Returns the GGUF file of a reference: the name of a built-in model, a GGUF file, or a directory with one in it.

    Raises `UnusableModel` for other references, and what `built_in_gguf` raises.
    """
    if reference in BUILT_IN:
        return built_in_gguf(BUILT_IN[reference], report)
    try:
        path = Path(reference).expanduser()
        named = path.is_file() and (path.suffix == ".gguf" or is_gguf(path))  # such as a blob, named by its digest
        found = [path] if named else sorted(path.glob("*.gguf"))
    except (OSError, RuntimeError, ValueError):  # such as a name too long, or ~ of an unknown user
        found = []
    if len(found) != 1:
        raise UnusableModel(
            f"{reference} has {len(found)} GGUF files, and the engine reads one: name the file, or one of "
            f"{', '.join(BUILT_IN)}, or use --engine torch",
            model=reference,
        )
    return found[0]


def _built_in(model: BuiltIn, weights: str, report: Report) -> Path:
    if kept := _in_cache(model.name, model.sha256, weights):
        return kept
    if weights:  # told before the download, which would be in vain
        with writing(cache_directory(), "the download with its conversion"):
            needed = round(1e6 * model.megabytes * (1 + 8 * _KEPT[weights][1] / _BUILT_IN_BITS))
            check_space(cache_directory(), "the download with its conversion", needed - held_bytes(model))
    return _gguf(built_in_gguf(model, report), model.name, model.sha256, weights, report)


def _in_cache(name: str, digest: str, weights: str) -> Path | None:
    """Returns the directory that the GGUF file with this SHA-256 was converted to, if it is in the cache."""
    kinds = list(_KEPT)
    for kind in kinds[kinds.index(weights) :: -1]:  # the smallest that will do
        found = cache_directory() / f"{name}{_KEPT[kind][0]}"
        if source_of(found) == digest:
            return _kept(found, bool(kind))
    return None


def _gguf(path: Path, name: str, sha256: str | None, weights: str, report: Report) -> Path:
    """Returns the transformers directory of a GGUF file, converted if it is not in the cache.

    `sha256`: the file's, if that was checked. Raises `UnusableModel`, `DamagedFile`, `CacheUnusable` or `NoSpace`.
    """
    with reading(path):
        digest = sha256 or remembered_sha256(path)
    name = name if sha256 else f"{shortened(name)}-{digest[:12]}"
    if kept := _in_cache(name, digest, weights):
        return kept
    final = cache_directory() / f"{name}{_KEPT[weights][0]}"
    with making(final) as scratch:
        if kept := _in_cache(name, digest, weights):  # another process has converted it meanwhile
            return kept
        report(f"converting {name} (once)" if weights else f"reading the tokenizer of {name} (once)")
        if weights:
            _check_space(path, scratch, _KEPT[weights][1])
        converted = scratch / "converted"
        # In a child process, because conversion takes several times the memory of the model.
        done = subprocess.run(
            bound_command("services.store.convert", str(path), str(converted), weights),
            stdout=sys.stderr,
            check=False,
            env=environment_before(),
        )
        if done.returncode:
            check_space(scratch, "the converted model")  # others may have filled the disk meanwhile
            if done.returncode < 0:
                raise UnusableModel(
                    f"the conversion of {path.name} was killed (signal {-done.returncode}), perhaps for want of "
                    "memory: free some, or use an engine that reads GGUF files (--engine ik_llama)",
                    model=path,
                )
            if done.returncode == CUT_STATUS:
                raise DamagedFile(
                    f"{path} is damaged or incomplete, because it ends before its last tensor: download or copy it "
                    "again, and compare its size with the original's",
                    model=path,
                )
            # Whatever reads the file needs its tokenizer, so that no other engine need try.
            kind = UnusableModel if weights else DamagedFile
            raise kind(
                f"{path.name} could not be converted: see the message above. The file may be damaged, or transformers "
                "may not read its architecture from GGUF: give a directory that save_pretrained wrote instead, or one "
                "with this file, config.json and tokenizer.json for an engine that reads GGUF files",
                model=path,
            )
        name_revision(converted, digest)
        settle(converted, final)
    return final


def _check_space(path: Path, scratch: Path, size: int) -> None:
    """Raises `NoSpace` if the disk has no room for the weights of a GGUF file with `size` bytes each."""
    # Reading a file's metadata takes seconds, and is left out where there is room at any number of bits.
    if shutil.disk_usage(scratch).free > path.stat().st_size * 8 * size / _FEWEST_BITS:
        return
    try:
        needed = size * sum(int(tensor.n_elements) for tensor in reader()(path).tensors)
    except Exception:  # a damaged file, which the conversion reports
        return
    check_space(scratch, "the converted model", needed)


if __name__ == "__main__":
    resolve(sys.argv[1], weights="")
