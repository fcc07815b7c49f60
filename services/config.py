"""Declares the configuration of each process. `services/config_reading.py` reads it."""

from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from bridge.errors import DraftBridgeError
from draftbridge.security import Credentials, is_local
from services.config_values import Cores, Engine, Hosts, Listen, Name, OptionalListen, Origins, Otlp, Service
from services.engines.registry import AUTO, engines
from services.engines.spec import Dtype, EngineOptions, GaudiOptions, Weights
from services.logs import LogFormat, LogLevel
from services.store.built_in import SUFFIX

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


def exposure(address: str, missing: str) -> str:
    """Returns why a server on `address` does not start, and what to do."""
    return (
        f"is {address}, which other machines can reach, so it needs {missing}: set them, listen on 127.0.0.1, or give "
        "--insecure if everything that can reach this address is trusted"
    )


class Configuration(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: object, info: ValidationInfo) -> object:
        """Refuses `true` as a number, which it would be as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind in (int, float, int | None):
            raise ValueError("a number, not true or false")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields the field and the problem of settings that are valid alone but not together."""
        yield from ()

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yields the field and the problem of settings that this process ignores.

        They are errors on the command line only: a variable or a file may be for other processes, too.
        """
        yield from ()

    def _pair(self, certificate: str, key: str) -> Iterator[tuple[str, str]]:
        for given, other in ((certificate, key), (key, certificate)):
            if getattr(self, given) and not getattr(self, other):
                yield given, f"needs {option(other)} too: a certificate and its key belong together"


class ProcessConfig(Configuration):
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
        False,
        description="Allow other machines to connect without TLS, and without keys or client certificates; and send a "
        "token to other machines without TLS.",
    )
    grace: float = Field(
        20.0, ge=0, le=86_400, description="Seconds that running calls have to end after SIGTERM or SIGINT."
    )
    metrics: OptionalListen = Field(
        "", description="HOST:PORT to serve Prometheus metrics on; port 0: a free one, which is printed. Unset: off."
    )
    otlp: Otlp = Field("", description="OTLP/gRPC endpoint to send traces to, as http://HOST:4317. Unset: off.")
    log_format: LogFormat = Field(LogFormat.TEXT, description="Format of log lines.")
    log_level: LogLevel = Field(
        LogLevel.WARNING, description="The least important lines to log; info: one for each call."
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields incomplete TLS settings, and addresses that other machines can reach without TLS or authentication."""
        yield from self._pair("tls_certificate", "tls_key")
        if self.tls_client_ca and not self.tls_certificate:
            yield "tls_client_ca", "needs --tls-certificate and --tls-key too"
        for field in ("listen", "http", "metrics"):
            address = getattr(self, field, "")
            if address and not self.insecure and (missing := self.lacks(address)):
                yield field, exposure(address, missing)

    def lacks(self, address: str) -> str:
        """Returns what a server on `address` lacks to be safe from strangers, or "".

        Certificates of clients (`tls_client_ca`) authenticate as keys do.
        """
        missing = []
        if self.tls_certificate is None:
            missing.append("TLS (--tls-certificate and --tls-key)")
        if self.keys is None and self.tls_client_ca is None:
            missing.append("clients' keys (--keys) or certificates (--tls-client-ca)")
        return "" if is_local(address) else " and ".join(missing)


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
    listen: Listen = Field("127.0.0.1:50051", description=_LISTEN_HELP)
    name: Name = Field("", description="Name to serve the model under; by default derived from MODEL.")
    engine: Engine = Field("torch", description=_ENGINE_HELP)
    device: str = Field("auto", description="Device to run on: auto, cpu, cuda, cuda:1, gpu, ...")
    dtype: Dtype = Field(Dtype.AUTO, description="Data type to compute in; auto lets the engine choose.")
    weights: Weights = Field(Weights.AUTO, description="Storage format of the weights; see `draftbridge engines`.")
    compile: bool = Field(
        False, description="CPU: compile at start, for minutes, to halve the time of short passes. CUDA: record graphs."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="Number of CPU threads; by default one per core.")
    cpu_affinity: Cores = Field(
        "", description="Cores to run on: numbers as 0-7,16, or numa:0 for a NUMA node's physical cores. Unset: all."
    )
    slots: int = Field(8, ge=1, le=1024, description="Number of sequences in the KV cache at once.")
    kv_memory: float = Field(2.0, ge=0.001, le=1e6, description="GiB of memory for the KV cache, reserved at start.")
    queue: int = Field(64, ge=0, le=100_000, description="Number of requests that may wait for a slot.")
    forward_limit: float = Field(
        120.0,
        ge=1,
        description="Seconds after which a forward counts as hung, or ten times its expected time if longer.",
    )
    deterministic: bool | None = Field(
        None,
        description="Generate the same text in every speculation mode, bit for bit, in any dtype. Unset: targets do if "
        "it costs little (ik_llama; torch on CPUs, where prompts take 1.3 to 1.8 times as long).",
    )
    # More than two million ids. Parsing blocks all other calls for up to 20 ms per MiB.
    message_limit: int = Field(8, ge=1, le=1024, description="MiB of the largest message accepted.")
    trust_model: bool = Field(
        False, description="Run Python files and load pickled weights of MODEL, a directory; torch and habana only."
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

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yields the settings of engines for prompt lookup, which has none."""
        for field in _OF_ENGINES if self.model == SUFFIX else ():
            if getattr(self, field) not in (type(self).model_fields[field].default, AUTO):
                yield field, f"must be left out with {SUFFIX}, which runs without an engine"

    @property
    def determinism(self) -> bool | None:
        """Whether logits must depend on the text alone, bit for bit; None: if that costs little."""
        return False if self.deterministic is None and self.role is Role.DRAFT else self.deterministic

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

    target: tuple[Service, ...] = Field(
        (),
        description="HOST:PORT of a target service. Repeatable. Services of one model are replicas, and so are the "
        "addresses of a host name. Without a target, a bridge only proposes candidates to engines such as vLLM.",
    )
    draft: tuple[Service, ...] = Field(
        (), description="HOST:PORT of a draft service. Repeatable. A draft that starts later is used once it answers."
    )
    listen: Listen = Field(DEFAULT_BRIDGE, description=_LISTEN_HELP)
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the address, one per core to use. Each has its own limits.",
    )
    share_port: bool = Field(
        False,
        description="Let other bridges listen on the same address: the system divides connections among them.",
    )
    connect_timeout: float = Field(
        10.0,
        ge=0.1,
        le=86_400,
        description="Seconds to wait for the targets. The bridge does not start if none of them answers.",
    )
    service_keepalive: float = Field(
        20.0,
        ge=0.1,
        le=3600,
        description="Seconds between pings to a service; its calls fail if it does not answer within half of this.",
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
    service_tls: bool = Field(False, description="Connect to services with TLS, even without the next three settings.")
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
    ngram_memory: int = Field(
        0, ge=0, le=1 << 20, description="MiB to learn from outputs, for the same tenant or engine only; 0: off."
    )
    pair_memory: Path | None = Field(
        None, description="SQLite file that keeps what the bridge learns about pairs. Unset: forgotten at its end."
    )
    guest_sequences: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Sequences of engines (guests) to hold at once; the least recently named ones are dropped.",
    )
    guest_memory: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="MiB of memory for the sequences of guests, and as much again for tokenizers that they send.",
    )
    guest_drafts: int = Field(
        8, ge=0, le=100_000, description="Sequences of guests that a draft proposes for at once; others go without."
    )
    guest_idle: float = Field(
        600.0, ge=1, le=1e6, description="Seconds after which a sequence that its guest has not named ends."
    )
    http: OptionalListen = Field(
        "", description="HOST:PORT to listen on for HTTP too: OpenAI's protocol, and a page to try it."
    )
    http_origin: Origins = Field(
        (), description="Origin whose web pages may call the HTTP server, as https://HOST. Repeatable."
    )
    http_host: Hosts = Field(
        (), description="Name by which a proxy addresses the HTTP server. Repeatable. Loopback names are always valid."
    )
    http_body: int = Field(4, ge=1, le=1024, description="MiB that the body of an HTTP request may have.")
    http_sequences: int = Field(
        256, ge=1, le=100_000, description="Number of choices that are generated over HTTP at once."
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields also a certificate for the services without its key, and a service that is given twice."""
        yield from super().conflicts()
        yield from self._pair("service_certificate", "service_key")
        for field, services in (("target", self.target), ("draft", self.draft)):
            if twice := [one for place, one in enumerate(services) if one in services[:place]]:
                yield field, f"has {twice[0]} twice: give each service once, and another one for each replica"

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

    bridge: Service = Field(DEFAULT_BRIDGE, description="HOST:PORT of the bridge.")
    listen: Listen = Field("127.0.0.1:8000", description=_LISTEN_HELP)
    origin: Origins = Field((), description="Origin whose web pages may call this server, as https://HOST. Repeatable.")
    host: Hosts = Field(
        (), description="Name by which a proxy addresses this server. Repeatable. Loopback names are always valid."
    )
    body: int = Field(4, ge=1, le=1024, description="MiB that the body of a request may have.")
    sequences: int = Field(256, ge=1, le=100_000, description="Number of choices that are generated at once.")
    bridge_tls: bool = Field(False, description="Connect to the bridge with TLS, even without the next three settings.")
    bridge_ca: Path | None = Field(
        None, description="PEM file with the authorities of the bridge's certificate; by default gRPC's own list."
    )
    bridge_certificate: Path | None = Field(
        None, description="PEM file with the certificate to show to the bridge (mutual TLS)."
    )
    bridge_key: Path | None = Field(None, description="PEM file with the key of that certificate.")
    bridge_token_file: Path | None = Field(None, description="File with the token to present to the bridge.")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields also a certificate for the bridge without its key."""
        yield from super().conflicts()
        yield from self._pair("bridge_certificate", "bridge_key")

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
# The settings of `ModelServerConfig` that prompt lookup does not have.
_OF_ENGINES = (
    *("engine", "device", "dtype", "weights", "compile", "threads", "kv_memory", "queue", "forward_limit"),
    *("deterministic", "trust_model", *GAUDI),
)
# The settings of `ServerConfig` for what a server shows of its work.
INSIGHT = ("metrics", "otlp", "log_format", "log_level", "channelz")
# The tables of the configuration file; each has the name of the command that starts the process.
SECTIONS: dict[str, type[Configuration]] = {
    "serve": ModelServerConfig,
    "bridge": BridgeServerConfig,
    "http": HttpServerConfig,
}


def option(field: str) -> str:
    """Returns the name of a field's option or argument on the command line."""
    return field.upper() if field == "model" else f"--{field.replace('_', '-')}"
