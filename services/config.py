"""The configuration of each process: one frozen object, declared once, read from a file, the environment and flags.

A value comes from the first place that has it: the command line (`--kv-memory 4`), the environment
(`DRAFTBRIDGE_SERVE_KV_MEMORY=4`), the file (`[serve]`, `kv-memory = 4`), the default. The file is TOML with a table for
each kind of process; `--config` or `DRAFTBRIDGE_CONFIG` names it. Lists are separated by commas in the environment.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import DraftBridgeError
from services.engines.registry import engines
from services.engines.spec import Dtype, EngineOptions, Weights

DEFAULT_BRIDGE = "127.0.0.1:50050"
MODEL_HELP = "A built-in name such as gemma-3-270m, a directory, a GGUF file, or a Hugging Face id."
_LISTEN_HELP = "HOST:PORT to listen on. Port 0 takes a free port and prints it."
_ENGINE_HELP = f"The engine: {', '.join(engines())}, or auto for the fastest one that is installed."


class InvalidConfiguration(DraftBridgeError, reason="INVALID_CONFIGURATION"):
    """A value of the configuration is not allowed, or the file cannot be read; the text names place, key and remedy."""


class Role(StrEnum):
    """What a model server serves."""

    DRAFT = "draft"
    TARGET = "target"
    BOTH = "both"


class _Configuration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelServerConfig(_Configuration):
    """Configuration of a model server, `draftbridge serve`."""

    model: str = Field(description=f"{MODEL_HELP} As a draft also suffix: prompt lookup, which needs no model.")
    role: Role = Field(Role.BOTH, description="The role to serve the model in.")
    listen: str = Field("127.0.0.1:50051", description=_LISTEN_HELP)
    name: str = Field("", description="Name to serve the model under; by default its own.")
    engine: str = Field("torch", description=_ENGINE_HELP)
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, gpu, ...")
    dtype: Dtype = Field(Dtype.AUTO, description="Type to compute in; auto is bfloat16 where the device has it.")
    weights: Weights = Field(Weights.AUTO, description="How weights are stored; see `draftbridge engines`.")
    compile: bool = Field(
        False, description="Compile at start: takes minutes, then a pass takes half the time. On CUDA: record graphs."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; by default all cores.")
    slots: int = Field(8, ge=1, le=1024, description="Sequences in memory at a time.")
    kv_memory: float = Field(2.0, ge=0.001, le=1e6, description="GiB for keys and values, allocated at start.")
    queue: int = Field(64, ge=0, le=100_000, description="Requests that may wait for a slot.")
    deterministic: bool = Field(
        False, description="Give the same text in every mode, bit for bit, in any dtype; costs speed."
    )

    @property
    def options(self) -> EngineOptions:
        """What the engine is opened with."""
        return EngineOptions(
            self.device, self.dtype, self.weights, self.compile, self.threads, self.slots, int(self.kv_memory * 2**30)
        )


class BridgeServerConfig(_Configuration):
    """Configuration of a bridge, `draftbridge bridge`."""

    target: tuple[str, ...] = Field(min_length=1, description="HOST:PORT of a target service. Repeatable.")
    draft: tuple[str, ...] = Field(
        (), description="HOST:PORT of a draft service. Repeatable. One that is away is used as soon as it answers."
    )
    listen: str = Field(DEFAULT_BRIDGE, description=_LISTEN_HELP)
    connect_timeout: float = Field(
        10.0, ge=0.1, description="Seconds to wait for each target. Without its targets a bridge does not start."
    )
    suffix_memory: int = Field(
        0, ge=0, le=1 << 20, description="MiB of earlier outputs to draw candidates from, separate for each tenant."
    )


# Tables of the file, which are also the commands that start the processes.
SECTIONS: dict[str, type[_Configuration]] = {"serve": ModelServerConfig, "bridge": BridgeServerConfig}
C = TypeVar("C", bound=_Configuration)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration, and the place that each of its values came from."""

    values: C
    origins: dict[str, str]


def load(
    kind: type[C],
    flags: Mapping[str, Any],
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    partial: bool = False,
) -> Loaded[C]:
    """Reads the configuration of one kind of process. `flags`: values from the command line, by field.

    `partial`: values that are missing are no error, and are missing from the result. Raises `InvalidConfiguration`.
    """
    section = next(name for name, one in SECTIONS.items() if one is kind)
    path = path or (Path(environment["DRAFTBRIDGE_CONFIG"]) if environment.get("DRAFTBRIDGE_CONFIG") else None)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(kind.model_fields, "default")
    if path:
        tables, text = _read(path)
        for key, value in tables.get(section, {}).items():
            place = f"{path}, {_line(text, section, key)}[{section}] {key}"
            name = _field(kind, key.replace("-", "_"), place, key)
            values[name], origins[name] = value, place
    prefix = f"DRAFTBRIDGE_{section.upper()}_"
    for key, value in environment.items():
        if key.startswith(prefix):
            name = _field(kind, key.removeprefix(prefix).lower(), key, key)
            many = "tuple" in str(kind.model_fields[name].annotation)
            values[name], origins[name] = value.replace(",", " ").split() if many else value, key
    for name, value in flags.items():
        values[name], origins[name] = value, option(kind, name)
    try:
        return Loaded(kind.model_validate(values), origins)
    except ValidationError as error:
        errors = [one for one in error.errors() if not (partial and one["type"] == "missing")]
        if errors:
            text = "; ".join(_explain(kind, section, one, origins) for one in errors)
            raise InvalidConfiguration(text) from None
        return Loaded(kind.model_construct(**values), origins)


def check(path: Path) -> list[str]:
    """Returns the names of a file's tables if all are valid; what a table leaves out may be given elsewhere.

    Raises `InvalidConfiguration`.
    """
    tables, text = _read(path)
    for section in tables:
        if section not in SECTIONS:
            place = f"{path}, {_line(text, section)}[{section}]"
            raise InvalidConfiguration(f"{place}: there is no such table: use {' or '.join(SECTIONS)}")
        load(SECTIONS[section], {}, path, {}, partial=True)
    return list(tables)


def option(kind: type[_Configuration], field: str) -> str:
    """Returns a field's name on the command line."""
    return field.upper() if field == "model" else f"--{field.replace('_', '-')}"


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    try:
        text = path.read_text()
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfiguration(f"{path} cannot be read ({reason}): give a TOML file, see docs") from None
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidConfiguration(f"{path}: {section} stands outside a table: put it under {_headers()}")
    return tables, text


def _headers() -> str:
    return " or ".join(f"[{section}]" for section in SECTIONS)


def _line(text: str, section: str, key: str = "") -> str:
    """Returns "line N: " for a key or a table of a file; the TOML library does not keep positions."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*[\"']?([\w-]+)", line):
            current = header[1]
            if not key and current == section:
                return f"line {number}: "
        elif key and current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return f"line {number}: "
    return ""


def _field(kind: type[_Configuration], name: str, place: str, written: str) -> str:
    """Returns the name if it is a field, else raises `InvalidConfiguration` with the most similar one."""
    if name in kind.model_fields:
        return name
    similar = get_close_matches(name, kind.model_fields, 1) or list(kind.model_fields)
    names = ", ".join(one.replace("_", "-") for one in similar)
    raise InvalidConfiguration(f"{place}: there is no such setting: did you mean {names}?")


def _explain(kind: type[_Configuration], section: str, error: Any, origins: Mapping[str, str]) -> str:
    """Returns one error of pydantic's in our words: the place, what is allowed, what was given."""
    name = str(error["loc"][0])
    if error["type"] == "missing":
        key = name.replace("_", "-")
        return (
            f"{option(kind, name)} is missing: give it on the command line, as "
            f"DRAFTBRIDGE_{section.upper()}_{name.upper()} or as {key} under [{section}] in the configuration file"
        )
    allowed = re.sub(r"^(Input|Value|Tuple) should be |^Input should ", "", error["msg"])
    return f"{origins[name]} must be {allowed}, got {error['input']!r}"
