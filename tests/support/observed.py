"""Processes that show what they do: their metrics, their log, and the traces that they send."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from services.cli.processes import stop
from tests.support import warm

_ADDRESSES = ("--until-stdin-closes", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Observed:
    """A process, the address that it serves on, the URL of its metrics, the file of its log, and its HTTP door."""

    process: warm.WarmProcess
    address: str
    metrics: str
    log: Path
    http: str = ""

    def scrape(self, token: str = "") -> Samples:
        """Returns the value of each sample by its name and labels."""
        request = urllib.request.Request(self.metrics, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples
        }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Returns one of our samples, 0 if there is none."""
    return samples.get((f"draftbridge_{name}", tuple(sorted(labels.items()))), 0.0)


def _start(*arguments: str, module: str, stderr: int) -> "subprocess.Popen[str]":
    words, pipe = [sys.executable, "-m", module, *arguments], subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, text=True)


@contextmanager
def observed(
    directory: Path, name: str, *arguments: str, module: str = "services.cli", torch: bool = True
) -> Iterator[Observed]:
    """Runs a server with metrics: of the `draftbridge` command, or a `module` that prints the same lines.

    Without `torch`, which only models of tests need, it takes less memory, but starts later.
    """
    log = directory / f"{name}.log"
    with log.open("w") as errors:
        start = warm.start if torch else _start
        process = start(*arguments, *_ADDRESSES, module=module, stderr=errors.fileno())
    try:
        metrics = address = http = ""
        for line in process.stdout:
            if line.startswith("metrics at "):
                metrics = line.split()[-1]
            if line.startswith("listening on "):
                address, _, http = line.removeprefix("listening on ").strip().partition(" and ")
                break
        assert address and metrics, log.read_text()
        yield Observed(process, address, metrics, log, http)
    finally:
        stop(process)
        process.stdout.close()


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps the spans it gets, by the name of the service that sent them."""

    spans: list[tuple[str, Span]] = field(default_factory=list)

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object):  # type: ignore[no-untyped-def]  # noqa: N802
        for resource in request.resource_spans:
            names = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
            self.spans += [(names[0], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector() -> Iterator[tuple[str, Collector]]:
    """Runs a collector. Yields its address and what it gets."""
    got, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(got, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", got
    finally:
        server.stop(None).wait()
