"""Declares the configuration of each process and reads it from the command line, the environment and a file.

The first of these that sets a value wins: the command line (`--kv-memory 4`), the environment
(`DRAFTBRIDGE_SERVE_KV_MEMORY=4`), the file (`[serve]`, `kv-memory = 4`), the default. The file is TOML with a table for
each kind of process; `--config` or `DRAFTBRIDGE_CONFIG` names it. Lists in the environment are separated by commas.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import DraftBridgeError
from draftbridge.security import Credentials
from services.engines.registry import engines
from services.engines.spec import Dtype, EngineOptions, GaudiOptions, Weights
from services.logs import LogFormat, LogLevel

DEFAULT_BRIDGE = "127.0.0.1:50050"
MODEL_HELP = "A built-in name such as gemma-3-270m, a directory, a GGUF file, or a Hugging Face id."
_LISTEN_HELP = "HOST:PORT to listen on. With port 0, the system picks a free port, which is printed."
_ENGINE_HELP = f"{', '.join(engines())}, or auto for the fastest installed engine that can run the model."


class InvalidConfiguration(DraftBridgeError, reason="INVALID_CONFIGURATION"):
    """A configuration value is invalid, or the file cannot be read. The text names the place, the key and the fix."""


class Role(StrEnum):
    """The roles that a model server can serve its model in."""

    DRAFT = "draft"
    TARGET = "target"
    BOTH = "both"


class _Configuration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProcessConfig(_Configuration):
    """What all processes share: security, and what they show of their work."""

    tls_certificate: Path | None = Field(
        None, description="PEM file with the server's certificate chain. Turns TLS on. Read again when it changes."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with authorities: only clients with their certificates are served (mutual TLS)."
    )
    keys: Path | None = Field(
        None, description="TOML file with the keys (bearer tokens) of clients. Read again when it changes."
    )
    insecure: bool = Field(
        False, description="Allow other machines to connect without TLS, and without keys or client certificates."
    )
    grace: float = Field(
        20.0, ge=0, le=86_400, description="Seconds that running calls have to end after SIGTERM or SIGINT."
    )
    metrics: str = Field(
        "", description="HOST:PORT to serve Prometheus metrics on; port 0: a free one, which is printed. Unset: off."
    )
    otlp: str = Field("", description="OTLP/gRPC endpoint to send traces to, as http://HOST:4317. Unset: off.")
    log_format: LogFormat = Field(LogFormat.TEXT, description="Format of log lines.")
    log_level: LogLevel = Field(
        LogLevel.WARNING, description="The least important lines to log; info: one for each call."
    )


class ServerConfig(ProcessConfig):
    """What all gRPC servers share besides: their limits."""

    message_limit: int = Field(64, ge=1, le=1024, description="MiB of the largest message accepted.")
    call_limit: int = Field(1024, ge=1, le=1_000_000, description="Number of calls that may run at once.")
    stream_limit: int = Field(1024, ge=1, le=1_000_000, description="Number of calls at once on one connection.")
    metadata_limit: int = Field(16, ge=1, le=1024, description="KiB of metadata (headers) of one call.")
    channelz: bool = Field(
        False, description="Serve channelz, which shows the addresses of all connections to clients."
    )


class ModelServerConfig(ServerConfig):
    """Configuration of a model server, `draftbridge serve`."""

    model: str = Field(description=f"{MODEL_HELP} With --role draft also suffix: prompt lookup, without any model.")
    role: Role = Field(Role.BOTH, description="Role to serve the model in.")
    listen: str = Field("127.0.0.1:50051", description=_LISTEN_HELP)
    name: str = Field("", description="Name to serve the model under; by default derived from MODEL.")
    engine: str = Field("torch", description=_ENGINE_HELP)
    device: str = Field("auto", description="Device to run on: auto, cpu, cuda, cuda:1, gpu, ...")
    dtype: Dtype = Field(Dtype.AUTO, description="Data type to compute in; auto lets the engine choose.")
    weights: Weights = Field(Weights.AUTO, description="Storage format of the weights; see `draftbridge engines`.")
    compile: bool = Field(
        False, description="CPU: compile at start, for minutes, to halve the time of short passes. CUDA: record graphs."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="Number of CPU threads; by default one per core.")
    cpu_affinity: str = Field(
        "", description="Cores to run on: numbers as 0-7,16, or numa:0 for a NUMA node's physical cores. Unset: all."
    )
    slots: int = Field(8, ge=1, le=1024, description="Number of sequences in the KV cache at once.")
    kv_memory: float = Field(2.0, ge=0.001, le=1e6, description="GiB of memory for the KV cache, reserved at start.")
    queue: int = Field(64, ge=0, le=100_000, description="Number of requests that may wait for a slot.")
    forward_limit: float = Field(
        120.0, ge=1, description="Seconds after which a forward counts as hung; later if the model is slow."
    )
    deterministic: bool = Field(
        False, description="Generate the same text in every speculation mode, bit for bit, in any dtype. Slower."
    )
    # More than two million ids. Parsing blocks all other calls for up to 20 ms per MiB.
    message_limit: int = Field(8, ge=1, le=1024, description="MiB of the largest message accepted.")
    trust_model: bool = Field(
        False, description="Run Python files and load pickled weights of the model's directory; engine torch only."
    )

    # Named as in optimum-habana's text-generation example.
    use_hpu_graphs: bool = Field(True, description="Record each shape of a pass as an HPU graph.")
    limit_hpu_graphs: bool = Field(False, description="Run passes over prompts without graphs, to save memory.")
    max_graphs: int | None = Field(None, ge=1, description="Number of graphs to keep; by default all.")
    bucket_size: int = Field(128, ge=1, le=512, description="Pad prompts to this many tokens times a power of two.")
    bucket_internal: bool = Field(
        False, description="Read the KV cache in buckets too: faster for short texts, more shapes to warm up."
    )
    attn_softmax_bf16: bool = Field(False, description="Compute attention's softmax in bfloat16.")
    use_flash_attention: bool = Field(False, description="Use Habana's fused attention, if the model has it.")
    flash_attention_recompute: bool = Field(False, description="Fused attention in recompute mode, to save memory.")
    flash_attention_fast_softmax: bool = Field(False, description="Fused attention with its fast softmax.")
    quant_config: Path | None = Field(
        None, description="JSON file of Intel Neural Compressor: measure a model for FP8, or run it in FP8."
    )

    @property
    def options(self) -> EngineOptions:
        """The options that the engine is opened with."""
        return EngineOptions(
            self.device,
            self.dtype,
            self.weights,
            self.compile,
            self.threads,
            self.slots,
            int(self.kv_memory * 2**30),
            self.trust_model,
            GaudiOptions(**{name: getattr(self, name) for name in GAUDI}),
        )


class BridgeServerConfig(ServerConfig):
    """Configuration of a bridge, `draftbridge bridge`."""

    target: tuple[str, ...] = Field(
        (),
        description="HOST:PORT of a target service. Repeatable. Services of one model are replicas, and so are the "
        "addresses of a host name. Without a target, a bridge serves candidates to guests only.",
    )
    draft: tuple[str, ...] = Field(
        (), description="HOST:PORT of a draft service. Repeatable. A draft that starts later is used once it answers."
    )
    listen: str = Field(DEFAULT_BRIDGE, description=_LISTEN_HELP)
    workers: int = Field(
        1, ge=1, le=256, description="Processes that share the address, one for each core to use. Limits are of each."
    )
    share_port: bool = Field(False, description="Let other bridges listen on the same address: connections are shared.")
    connect_timeout: float = Field(
        10.0, ge=0.1, description="Seconds to wait for the targets. The bridge does not start if none of them answers."
    )
    service_keepalive: float = Field(
        20.0, ge=0.1, le=3600, description="Seconds between pings to a service; lost if it does not answer in half."
    )
    resolve_interval: float = Field(
        5.0, ge=0.1, le=3600, description="Seconds between look-ups of the host names of targets and drafts."
    )
    max_requests: int = Field(
        256, ge=1, le=1_000_000, description="Requests that may run at a time; further ones are refused, to be retried."
    )
    message_limit: int = Field(16, ge=1, le=1024, description="MiB of the largest message accepted.")
    prompt_limit: int = Field(
        4096, ge=1, le=1 << 20, description="KiB of the largest prompt or chat; an id counts as four bytes."
    )
    service_tls: bool = Field(False, description="Connect to services with TLS, also without the next three.")
    service_ca: Path | None = Field(
        None, description="PEM file with the authorities of the services' certificates; by default gRPC's own list."
    )
    service_certificate: Path | None = Field(
        None, description="PEM file with the certificate that the bridge shows to its services (mutual TLS)."
    )
    service_key: Path | None = Field(None, description="PEM file with the key of the service certificate.")
    service_token_file: Path | None = Field(
        None, description="File with the token that the bridge presents to its services."
    )
    suffix_memory: int = Field(
        0, ge=0, le=1 << 20, description="MiB for earlier outputs, as candidates for the same tenant only; 0: off."
    )
    pair_memory: Path | None = Field(
        None, description="SQLite file that keeps what the bridge learns about pairs. Unset: forgotten at its end."
    )
    guest_sequences: int = Field(
        4096, ge=1, le=1_000_000, description="Sequences of engines (guests) to hold at once; the least recent ones go."
    )
    guest_memory: int = Field(1024, ge=1, le=1 << 20, description="MiB of memory for the sequences of guests.")
    guest_drafts: int = Field(
        8, ge=0, le=100_000, description="Sequences of guests that a draft proposes for at once; others go without."
    )
    guest_idle: float = Field(
        600.0, ge=1.0, description="Seconds after which a sequence that its guest has not named ends."
    )
    http: str = Field("", description="HOST:PORT to listen on for HTTP too: OpenAI's protocol, and a page to try it.")
    http_origin: tuple[str, ...] = Field(
        (), description="Origin whose web pages may call the HTTP server, as https://HOST. Repeatable."
    )
    http_host: tuple[str, ...] = Field(
        (), description="Name by which a proxy addresses the HTTP server. Repeatable. Loopback names are always valid."
    )
    http_body: int = Field(4, ge=1, le=1024, description="MiB that the body of an HTTP request may have.")
    http_sequences: int = Field(
        256, ge=1, le=100_000, description="Number of choices that are generated over HTTP at once."
    )

    @property
    def credentials(self) -> Credentials:
        """What the bridge shows to its services."""
        return Credentials(
            tls=self.service_tls,
            ca=self.service_ca,
            certificate=self.service_certificate,
            key=self.service_key,
            token_file=self.service_token_file,
            insecure=self.insecure,
        )


class HttpServerConfig(ProcessConfig):
    """Configuration of an HTTP door to a bridge elsewhere, `draftbridge http`."""

    bridge: str = Field(DEFAULT_BRIDGE, description="HOST:PORT of the bridge.")
    listen: str = Field("127.0.0.1:8000", description=_LISTEN_HELP)
    origin: tuple[str, ...] = Field(
        (), description="Origin whose web pages may call this server, as https://HOST. Repeatable."
    )
    host: tuple[str, ...] = Field(
        (), description="Name by which a proxy addresses this server. Repeatable. Loopback names are always valid."
    )
    body: int = Field(4, ge=1, le=1024, description="MiB that the body of a request may have.")
    sequences: int = Field(256, ge=1, le=100_000, description="Number of choices that are generated at once.")
    bridge_tls: bool = Field(False, description="Connect to the bridge with TLS, also without the next three.")
    bridge_ca: Path | None = Field(
        None, description="PEM file with the authorities of the bridge's certificate; by default gRPC's own list."
    )
    bridge_certificate: Path | None = Field(
        None, description="PEM file with the certificate to show to the bridge (mutual TLS)."
    )
    bridge_key: Path | None = Field(None, description="PEM file with the key of that certificate.")
    bridge_token_file: Path | None = Field(None, description="File with the token to present to the bridge.")

    @property
    def credentials(self) -> Credentials:
        """What the door shows to the bridge."""
        return Credentials(
            tls=self.bridge_tls,
            ca=self.bridge_ca,
            certificate=self.bridge_certificate,
            key=self.bridge_key,
            token_file=self.bridge_token_file,
            insecure=self.insecure,
        )


# The settings of `ModelServerConfig` for the habana engine alone.
GAUDI = tuple(one.name for one in fields(GaudiOptions))
# The settings of `ServerConfig` for what a server shows of its work.
INSIGHT = ("metrics", "otlp", "log_format", "log_level", "channelz")
# The tables of the configuration file; each has the name of the command that starts the process.
SECTIONS: dict[str, type[_Configuration]] = {
    "serve": ModelServerConfig,
    "bridge": BridgeServerConfig,
    "http": HttpServerConfig,
}
C = TypeVar("C", bound=_Configuration)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration, and for each field the place that its value came from."""

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
    """Reads the configuration of one kind of process. `flags` holds the command line's values by field name.

    With `partial`, a missing required value is not an error: the result lacks it. Raises `InvalidConfiguration`.
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
    """Returns the names of a file's tables. Raises `InvalidConfiguration` for an unknown table, key or invalid value.

    A required value may be missing: the command line or the environment can provide it.
    """
    tables, text = _read(path)
    for section in tables:
        if section not in SECTIONS:
            place = f"{path}, {_line(text, section)}[{section}]"
            raise InvalidConfiguration(f"{place}: unknown table: use {_headers()}")
        load(SECTIONS[section], {}, path, {}, partial=True)
    return list(tables)


def option(kind: type[_Configuration], field: str) -> str:
    """Returns the name of a field's option or argument on the command line."""
    return field.upper() if field == "model" else f"--{field.replace('_', '-')}"


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    try:
        text = path.read_text()
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfiguration(f"{path} cannot be read ({reason}): give the path of a TOML file") from None
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidConfiguration(f"{path}: {section} is outside any table: put it under {_headers()}")
    return tables, text


def _headers() -> str:
    return " or ".join(f"[{section}]" for section in SECTIONS)


def _line(text: str, section: str, key: str = "") -> str:
    """Returns "line N: " for a key or a table of a file, because the TOML library does not keep positions."""
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
    """Returns `name` if it is a field. Raises `InvalidConfiguration` with the most similar name otherwise."""
    if name in kind.model_fields:
        return name
    similar = get_close_matches(name, kind.model_fields, 1) or list(kind.model_fields)
    names = ", ".join(one.replace("_", "-") for one in similar)
    raise InvalidConfiguration(f"{place}: unknown setting: did you mean {names}?")


def _explain(kind: type[_Configuration], section: str, error: Any, origins: Mapping[str, str]) -> str:
    """Formats one pydantic error as the place, what is allowed there, and what it has."""
    name = str(error["loc"][0])
    if error["type"] == "missing":
        key = name.replace("_", "-")
        return (
            f"{option(kind, name)} is missing: give it on the command line, as "
            f"DRAFTBRIDGE_{section.upper()}_{name.upper()} or as {key} under [{section}] in the configuration file"
        )
    allowed = re.sub(r"^(Input|Value|Tuple) should be |^Input should ", "", error["msg"])
    return f"{origins[name]} must be {allowed}, got {error['input']!r}"
