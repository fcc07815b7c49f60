"""Declares the Prometheus metrics of every process. Each server has one object with a registry of its own.

Counting costs nothing between the passes of a request: a bridge's metrics read the statistics of running requests when
they are scraped. Names of speculation counters are vLLM's; the histogram of calls follows OpenTelemetry's conventions.
"""

import threading
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from bridge.generation import Finished
from bridge.statistics import PlanStatistics, SourceStatistics, Statistics
from bridge.text.vocabulary import Vocabulary
from services.engines.observer import SchedulerObserver
from services.engines.scheduler import Scheduler
from services.version import VERSION

PREFIX = "draftbridge"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FINE_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def readable_accept(accept: str) -> str:
    """Returns the value of an Accept header; empty if the library, which serves the metrics, fails on its version."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return ""
    return accept


class ServerMetrics:
    """What every process counts: the calls that it serves, and itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauge("build_info", "The version, as a label; the value is 1.", "version").labels(VERSION).set(1)
        self.call_duration = self._histogram(
            "rpc_server_call_duration_seconds",
            "Duration of calls; OpenTelemetry's rpc.server.call.duration.",
            _SECONDS,
            "rpc_method",
            "rpc_response_status_code",
        )
        self.active_calls = self._gauge("rpc_server_active_calls", "Calls in progress.", "rpc_method")
        self.certificate_end = self._gauge(
            "tls_certificate_not_after_seconds",
            "End of the validity of the certificate that a new connection gets, in seconds since 1970; only with TLS.",
            "path",
        )

    def watch_certificate(self, path: str, end: Callable[[], float]) -> None:
        """Reads the end of a certificate's validity at each scrape."""
        self.certificate_end.labels(path).set_function(end)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=tuple(buckets))


class HttpMetrics(ServerMetrics):
    """What a process counts that may have an HTTP door."""

    def __init__(self) -> None:
        super().__init__()
        self.http_duration = self._histogram(
            "http_server_request_duration_seconds",
            "Duration of HTTP requests; OpenTelemetry's http.server.request.duration.",
            _SECONDS,
            "http_request_method",
            "http_route",
            "http_response_status_code",
        )
        self.active_http_requests = self._gauge(
            "http_server_active_requests", "HTTP requests in progress.", "http_route"
        )


class Connections(Protocol):
    """What a bridge's metrics read of its connections when they are scraped."""

    def vocabularies(self) -> list[Vocabulary]:
        """Returns the tokenizers in use, each once."""
        ...

    def connected(self) -> list[tuple[str, str, bool]]:
        """Returns the address and the role of each configured service, and whether it is connected."""
        ...


class BridgeMetrics(HttpMetrics, Collector):
    """What a bridge counts."""

    def __init__(self) -> None:
        super().__init__()
        # The first collector of a scrape brings the counters up to date.
        self._lock = threading.Lock()
        self._running: set[RequestMetrics] = set()
        self._connections: Connections | None = None
        self.registry.register(self)
        self.requests = self._counter("requests", "Generations that ended, by outcome.", "outcome")
        for outcome in ("finished", "refused", "failed", "cancelled"):
            self.requests.labels(outcome)
        active = self._gauge("active_requests", "Generations in progress.")
        active.set_function(lambda: len(self._running))
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts of finished generations.")
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that targets had in their caches."
        )
        self.generation_tokens = self._counter(
            "generation_tokens", "Tokens generated, also by generations that failed."
        )
        self.passes = self._counter("target_passes", "Passes of targets, those that read prompts included.")
        self.drafts = self._counter("spec_decode_num_drafts", "Passes that verified candidates of a source.", "source")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Candidates verified.", "source")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Candidates accepted.", "source")
        self.near_ties = self._counter("near_ties", "Tokens whose choice rounding may have decided.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival at the bridge to its first token.", _SECONDS
        )
        self.output_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time of a finished generation's tokens after the first.",
            _FINE_SECONDS,
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From a request's arrival to the end of its text.", _SECONDS
        )
        self.forward_seconds = self._counter("target_forward_seconds", "Time of the targets' passes.")
        self.waited_seconds = self._counter("target_waited_seconds", "Time that targets waited for candidates.")
        self.bridge_seconds = self._counter("bridge_seconds", "Time for translation and planning between passes.")
        self.plan_passes = self._counter("plan_passes", "Passes after the first of a request, by kind of plan.", "plan")
        self.plan_tokens = self._counter("plan_tokens", "Tokens of passes after the first, by kind of plan.", "plan")
        self.plan_seconds = self._counter(
            "plan_measured_seconds", "Time of passes after the first, by kind of plan.", "plan"
        )
        self.predicted_tokens = self._counter(
            "plan_predicted_tokens", "Tokens that the planner predicted for these passes.", "plan"
        )
        self.predicted_seconds = self._counter(
            "plan_predicted_seconds", "Time that the planner predicted for these passes.", "plan"
        )
        self.guest_engines = self._gauge("guest_engines", "Connected engines that keep their own loop.")
        self.guest_sequences = self._gauge("guest_sequences", "Sequences held for these engines.")
        self.guest_steps = self._histogram(
            "guest_step_seconds", "From an engine's step to the bridge's answer.", _FINE_SECONDS
        )
        self.guest_proposed = self._counter("guest_proposed_tokens", "Candidates worth verifying in one forward.")
        self.guest_verified = self._counter("guest_verified_tokens", "Candidates that engines verified.", "source")
        self.guest_accepted = self._counter("guest_accepted_tokens", "Candidates that engines accepted.", "source")

    def request(self, statistics: Statistics) -> "RequestMetrics":
        """Returns the metrics of a request that begins now and counts into `statistics`. Its `end` must be called."""
        request = RequestMetrics(self, statistics)
        with self._lock:
            self._running.add(request)
        return request

    def watch(self, connections: Connections) -> None:
        """Reads the metrics of connections and tokenizers from `connections` at each scrape."""
        self._connections = connections

    def describe(self) -> tuple[GaugeMetricFamily, CounterMetricFamily, CounterMetricFamily]:
        """See `Collector`."""
        connected = GaugeMetricFamily(
            f"{PREFIX}_endpoint_connected", "1 if a model service is connected, else 0.", labels=("address", "role")
        )
        queries = CounterMetricFamily(
            f"{PREFIX}_encoded_prompt_bytes",
            "Bytes of prompts, by tokenizer (the first 12 digits of its SHA-256).",
            labels=("tokenizer",),
        )
        hits = CounterMetricFamily(
            f"{PREFIX}_encoded_prompt_cached_bytes",
            "Bytes of prompts encoded before, by tokenizer.",
            labels=("tokenizer",),
        )
        return connected, queries, hits

    def collect(self) -> Iterable[Metric]:
        """Adds what the running requests have counted since the last scrape, and returns the metrics of connections."""
        with self._lock:
            for request in self._running:
                request.count()
        connected, queries, hits = self.describe()
        if self._connections:
            for address, role, is_connected in self._connections.connected():
                connected.add_metric((address, role), is_connected)
            for vocabulary in self._connections.vocabularies():
                queries.add_metric((vocabulary.sha256[:12],), vocabulary.prefixes.query_byte_count)
                hits.add_metric((vocabulary.sha256[:12],), vocabulary.prefixes.hit_byte_count)
        return connected, queries, hits

    def _ended(self, request: "RequestMetrics", outcome: str) -> None:
        with self._lock:
            request.count()
            self._running.discard(request)
        self.requests.labels(outcome).inc()


class RequestMetrics:
    """The metrics of one request. Counters get the difference to what they already have of its statistics."""

    def __init__(self, metrics: BridgeMetrics, statistics: Statistics) -> None:
        self._metrics, self._statistics = metrics, statistics
        self._started_ns = perf_counter_ns()
        self._counted: dict[Counter, float] = {}
        self.generated_token_count = 0

    def on_delta(self, token_count: int) -> None:
        """Counts tokens that are sent to the client."""
        if not self.generated_token_count:
            self._metrics.first_token.observe((perf_counter_ns() - self._started_ns) / 1e9)
        self.generated_token_count += token_count

    def on_finished(self, end: Finished) -> None:
        """Counts what only a generation that ends well knows."""
        metrics = self._metrics
        metrics.prompt_tokens.inc(end.prompt_token_count)
        metrics.cached_prompt_tokens.inc(self._statistics.cached_token_count)
        metrics.request_duration.observe(end.elapsed_ns / 1e9)
        if end.generated_token_count > 1:
            later_ns = end.elapsed_ns - end.first_token_ns
            metrics.output_token.observe(later_ns / 1e9 / (end.generated_token_count - 1))

    def end(self, outcome: str) -> None:
        """Ends the request: finished, refused, failed or cancelled."""
        self._metrics._ended(self, outcome)

    def count(self) -> None:
        """Brings the counters up to date. May run in any thread: the loop may go on counting meanwhile."""
        metrics, statistics = self._metrics, self._statistics
        self._raise(metrics.generation_tokens, self.generated_token_count)
        self._raise(metrics.passes, statistics.target_pass_count)
        self._raise(metrics.near_ties, statistics.near_ties)
        self._raise(metrics.forward_seconds, statistics.verify_ns / 1e9)
        self._raise(metrics.waited_seconds, statistics.waited_ns / 1e9)
        self._raise(metrics.bridge_seconds, statistics.bridge_ns / 1e9)
        for source in list(statistics.sources.values()):
            self._count_source(source)
        for plan in list(statistics.plans.values()):
            self._count_plan(plan)

    def _count_source(self, source: SourceStatistics) -> None:
        metrics = self._metrics
        self._raise(metrics.drafts.labels(source.name), source.num_drafts)
        self._raise(metrics.draft_tokens.labels(source.name), source.num_draft_tokens)
        self._raise(metrics.accepted_tokens.labels(source.name), source.num_accepted_tokens)

    def _count_plan(self, plan: PlanStatistics) -> None:
        metrics = self._metrics
        self._raise(metrics.plan_passes.labels(plan.plan), plan.target_pass_count)
        self._raise(metrics.plan_tokens.labels(plan.plan), plan.token_count)
        self._raise(metrics.plan_seconds.labels(plan.plan), plan.elapsed_ns / 1e9)
        self._raise(metrics.predicted_tokens.labels(plan.plan), plan.predicted_token_count)
        self._raise(metrics.predicted_seconds.labels(plan.plan), plan.predicted_ns / 1e9)

    def _raise(self, counter: Counter, to: float) -> None:
        counter.inc(max(to - self._counted.get(counter, 0.0), 0.0))
        self._counted[counter] = max(to, self._counted.get(counter, 0.0))


class ModelMetrics(ServerMetrics, SchedulerObserver):
    """What a model server counts."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = self._gauge("kv_slots", "Slots of the KV cache.")
        self.slots_in_use = self._gauge("kv_slots_in_use", "Slots that sequences hold.")
        self.cache_bytes = self._gauge("kv_cache_bytes", "Memory reserved for the KV cache.")
        self.cache_bytes_in_use = self._gauge("kv_cache_bytes_in_use", "Memory of the tokens of running sequences.")
        self.queue_length = self._gauge("queue_length", "Sequences that wait for a slot.")
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Time that a step of a sequence waited for its forward.", _FINE_SECONDS
        )
        self.forward_duration = self._histogram("forward_duration_seconds", "Time of a forward.", _FINE_SECONDS)
        self.batch_sequences = self._histogram("batch_sequences", "Sequences of a forward.", _COUNTS[:9])
        self.batch_width = self._histogram("batch_width_tokens", "Tokens of a forward, of all sequences.", _COUNTS)
        self.forward_failures = self._counter("forward_failures", "Forwards that failed.")
        self.cache_queries = self._counter(
            "prefix_cache_queries", "Tokens of new sequences, looked up in the slots' caches."
        )
        self.cache_hits = self._counter("prefix_cache_hits", "Tokens of new sequences that a slot's cache held.")

    def watch(self, scheduler: Scheduler) -> None:
        """Reads the gauges from a scheduler at each scrape."""
        engine = scheduler.engine
        per_token = engine.cache_byte_count / (engine.slot_count * engine.context_length)
        self.slots.set(engine.slot_count)
        self.cache_bytes.set(engine.cache_byte_count)
        self.slots_in_use.set_function(lambda: engine.slot_count - scheduler.free_slot_count)
        self.cache_bytes_in_use.set_function(lambda: per_token * scheduler.held_token_count)
        self.queue_length.set_function(lambda: scheduler.queue_length)

    def on_start(self, token_count: int, cached_token_count: int) -> None:
        """See `SchedulerObserver`."""
        self.cache_queries.inc(token_count)
        self.cache_hits.inc(cached_token_count)

    def on_forward(self, sequence_count: int, token_count: int, forward_ns: int) -> None:
        """See `SchedulerObserver`."""
        self.batch_sequences.observe(sequence_count)
        self.batch_width.observe(token_count)
        self.forward_duration.observe(forward_ns / 1e9)

    def on_failure(self) -> None:
        """See `SchedulerObserver`."""
        self.forward_failures.inc()

    def on_job(self, queue_ns: int) -> None:
        """See `SchedulerObserver`."""
        self.queue_wait.observe(queue_ns / 1e9)
