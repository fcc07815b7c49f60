"""Compares the metrics of real processes with the statistics of the requests."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import grpc
import promql_parser
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from prometheus_client import Metric, generate_latest

from bridge.errors import Unreachable
from bridge.statistics import Statistics
from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2
from services.bridge.server import run
from services.bridge.zoo import Zoo
from services.config import BridgeServerConfig
from services.metrics import BridgeMetrics, ModelMetrics, ServerMetrics
from tests.support import guests, tiny
from tests.support.observed import Observed, Samples, observed, value
from tests.support.unread import UNREAD, hold_unread
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
PROMPT = "The quick brown fox"
GENERATE = "draftbridge.v1.BridgeService/Generate"


@dataclass(frozen=True)
class Trio:
    """A bridge, its target and its draft."""

    bridge: Observed
    target: Observed
    draft: Observed


@pytest.fixture(scope="module")
def trio(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Runs the three processes. The draft has the target's own model, so that its candidates are accepted."""
    directory = tmp_path_factory.mktemp("observed")
    options = ("--dtype", "float32", "--threads", "1", "--slots", "3", "--queue", "2", "--channelz")
    with ExitStack() as stack:
        target, draft = (
            stack.enter_context(observed(directory, role, "serve", str(tiny_models[0]), "--role", role, *options))
            for role in ("target", "draft")
        )
        models = ("--target", target.address, "--draft", draft.address)
        yield Trio(stack.enter_context(observed(directory, "bridge", "bridge", *models)), target, draft)


@pytest.fixture
def client(trio: Trio) -> Iterator[Client]:
    """Yields a client of the bridge, as soon as no request of another test is running."""
    eventually(lambda: value(trio.target.scrape(), "kv_slots_in_use") == 0)
    with Client(trio.bridge.address) as client:
        yield client


class Change:
    """Returns by how much samples have grown between two scrapes."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return value(self._after, name, **labels) - value(self._before, name, **labels)


def test_counters_grow_by_what_the_requests_report(trio: Trio, client: Client) -> None:
    before = trio.bridge.scrape()
    options = {"max_tokens": 60, "ignore_eos": True}
    repeating = {"logit_bias": {70: 80.0, 71: 80.0}}  # the text repeats two tokens, for suffix matches
    modes = (("lockstep", {}), ("auto", repeating), ("auto", repeating), ("off", {}))
    results = [client.generate(PROMPT, speculation=mode, **options, **changes) for mode, changes in modes]
    grown = Change(before, trio.bridge.scrape())
    did = [one.finished.speculation for one in results]
    usages = [one.finished.usage for one in results]

    assert grown("requests_total", outcome="finished") == 4
    assert grown("generation_tokens_total") == sum(one.generated_token_count for one in usages) == 240
    assert grown("prompt_tokens_total") == sum(one.prompt_token_count for one in usages)
    assert grown("cached_prompt_tokens_total") == sum(one.cached_token_count for one in usages) > 0
    assert grown("target_passes_total") == sum(one.target_pass_count for one in did)
    assert grown("near_ties_total") == sum(one.near_ties for one in did)
    assert grown("target_forward_seconds_total") == pytest.approx(sum(one.verify_ns for one in did) / 1e9)
    assert grown("target_waited_seconds_total") == pytest.approx(sum(one.waited_ns for one in did) / 1e9)
    assert grown("bridge_seconds_total") == pytest.approx(sum(one.bridge_ns for one in did) / 1e9)

    names = {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
    for source in ("draft", "suffix"):
        reported = [one for stats in did for one in stats.sources if one.name == source]
        for name in names:
            expected = sum(getattr(one, name) for one in reported)
            assert grown(f"spec_decode_{name}_total", source=source) == expected
    assert grown("spec_decode_num_accepted_tokens_total", source="draft") > 0
    total = sum(grown("spec_decode_num_draft_tokens_total", source=source) for source in ("draft", "suffix"))
    assert total == sum(one.num_draft_tokens for one in did) > 0

    plans = [plan for stats in did for plan in stats.plans]
    for name in {plan.plan for plan in plans}:
        ours = [plan for plan in plans if plan.plan == name]
        assert grown("plan_passes_total", plan=name) == sum(one.target_pass_count for one in ours)
        assert grown("plan_tokens_total", plan=name) == sum(one.token_count for one in ours)
        for metric, field in (("measured", "elapsed_ns"), ("predicted", "predicted_ns")):
            expected = sum(getattr(one, field) for one in ours) / 1e9
            assert grown(f"plan_{metric}_seconds_total", plan=name) == pytest.approx(expected)

    assert grown("time_to_first_token_seconds_count") == 4
    assert grown("time_per_output_token_seconds_count") == 4
    assert grown("request_duration_seconds_sum") == pytest.approx(sum(one.elapsed_ns for one in did) / 1e9)
    first = sum(one.first_token_ns for one in did) / 1e9
    assert first <= grown("time_to_first_token_seconds_sum") < first + 30
    per_token = sum((one.elapsed_ns - one.first_token_ns) / 1e9 / 59 for one in did)
    assert grown("time_per_output_token_seconds_sum") == pytest.approx(per_token)


def test_a_model_server_counts_its_forwards_and_its_cache(trio: Trio, client: Client) -> None:
    before = trio.target.scrape()
    prompt = "She sells sea shells by the sea shore. Really?"
    results = [client.generate(prompt, max_tokens=20, speculation="off") for _ in range(2)]
    # The stream ends with OK if the target ends it before the bridge cancels it.
    calls, verify = "rpc_server_call_duration_seconds_count", "draftbridge.v1.TargetService/Verify"

    def ended() -> float:
        grown = Change(before, trio.target.scrape())
        return sum(grown(calls, rpc_method=verify, rpc_response_status_code=code) for code in ("OK", "CANCELLED"))

    eventually(lambda: ended() == 2)
    after = trio.target.scrape()
    assert value(after, "kv_slots_in_use") == 0
    grown = Change(before, after)
    usages = [one.finished.usage for one in results]
    passes = sum(one.finished.speculation.target_pass_count for one in results)
    # A target may begin one more forward before its stream is cancelled.
    assert passes <= grown("forward_duration_seconds_count") <= passes + 2
    assert grown("batch_sequences_sum") == grown("forward_duration_seconds_count") == grown("queue_wait_seconds_count")
    assert grown("prefix_cache_queries_total") == sum(one.prompt_token_count for one in usages)
    assert grown("prefix_cache_hits_total") == sum(one.cached_token_count for one in usages) > 0
    computed = sum(one.prompt_token_count - one.cached_token_count for one in usages)
    assert grown("batch_width_tokens_sum") == computed + grown("forward_duration_seconds_count") - 2
    assert value(after, "kv_slots") == 3 and value(after, "kv_cache_bytes") > 0
    assert value(after, "forward_failures_total") == value(after, "queue_length") == 0


def test_a_running_request_is_visible_and_one_that_fails_or_is_cancelled_is_counted(
    trio: Trio, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_unread(monkeypatch)
    slow = Client(trio.bridge.address)
    before = trio.bridge.scrape()
    stream = slow.stream(PROMPT, speculation="off", **UNREAD)
    sent = 0
    for event in stream:
        sent += len(event.token_ids) if isinstance(event, bridge_pb2.GenerateDelta) else 0
        if sent >= 5:
            break
    running = trio.bridge.scrape()
    target = trio.target.scrape()
    assert value(running, "active_requests") == 1
    assert value(running, "rpc_server_active_calls", rpc_method=GENERATE) == 1
    assert Change(before, running)("generation_tokens_total") >= sent
    assert value(target, "kv_slots_in_use") == 1
    assert 0 < value(target, "kv_cache_bytes_in_use") < value(target, "kv_cache_bytes")
    stream.close()  # type: ignore[attr-defined]
    slow.close()
    with pytest.raises(CallError, match="no target"):
        client.generate(PROMPT, target="nobody")
    eventually(lambda: value(trio.bridge.scrape(), "active_requests") == 0)
    grown = Change(before, trio.bridge.scrape())
    assert grown("requests_total", outcome="cancelled") == grown("requests_total", outcome="refused") == 1
    assert grown("requests_total", outcome="finished") == grown("requests_total", outcome="failed") == 0
    for code in ("CANCELLED", "NOT_FOUND"):
        labels = {"rpc_method": GENERATE, "rpc_response_status_code": code}
        assert grown("rpc_server_call_duration_seconds_count", **labels) == 1
    assert grown("generation_tokens_total") >= sent, "tokens of a cancelled request remain counted"
    assert grown("target_passes_total") > 0


def test_methods_that_do_not_exist_make_no_metrics(trio: Trio) -> None:
    with grpc.insecure_channel(trio.bridge.address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/draftbridge.v1.BridgeService/Nonsense")(b"", timeout=60)
    assert "Nonsense" not in urllib.request.urlopen(trio.bridge.metrics, timeout=60).read().decode()


def test_refused_calls_are_counted_and_have_ids(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\ntoken = "alice-token-0123456789"\n')
    options = ("serve", "suffix", "--role", "draft", "--keys", str(keys))
    with observed(tmp_path, "draft", *options) as draft, grpc.insecure_channel(draft.address) as channel:
        for method, code in (("GetModel", "UNAUTHENTICATED"), ("Nonsense", "UNIMPLEMENTED")):
            call = channel.unary_unary(f"/draftbridge.v1.ModelService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=60, metadata=(("x-request-id", "job-1"),))
            assert caught.value.code().name == code
            if method == "GetModel":
                assert dict(caught.value.initial_metadata())["x-request-id"] == "job-1"
        counted = {"rpc_method": "draftbridge.v1.ModelService/GetModel", "rpc_response_status_code": "UNAUTHENTICATED"}
        samples = draft.scrape("alice-token-0123456789")
        assert value(samples, "rpc_server_call_duration_seconds_count", **counted) == 1
        assert all("Nonsense" not in label for _, labels in samples for _, label in labels)


def test_the_bridge_reports_its_services(trio: Trio) -> None:
    samples = trio.bridge.scrape()
    assert value(samples, "endpoint_connected", address=trio.target.address, role="target") == 1
    assert value(samples, "endpoint_connected", address=trio.draft.address, role="draft") == 1
    cached = [one for (name, _), one in samples.items() if name == "draftbridge_encoded_prompt_bytes_total"]
    assert len(cached) == 1 and all(cached), "one for each tokenizer"


def test_a_bridge_that_waits_for_its_first_target_shows_that_none_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, scraped = BridgeMetrics(), []

    async def wait(_: Zoo) -> None:
        scraped.append(generate_latest(metrics.registry).decode())
        raise Unreachable("127.0.0.1:1", "")

    monkeypatch.setattr(Zoo, "_connect_targets", wait)
    with pytest.raises(Unreachable):
        run(BridgeServerConfig(target=("127.0.0.1:1",), listen="127.0.0.1:0"), print, metrics=metrics)
    assert 'draftbridge_endpoint_connected{address="127.0.0.1:1",role="target"} 0.0' in scraped[0]


def test_channelz_is_served_only_if_asked_for(trio: Trio) -> None:
    request = channelz_pb2.GetServersRequest()
    with grpc.insecure_channel(trio.target.address) as channel:
        answer = channelz_pb2_grpc.ChannelzStub(channel).GetServers(request, timeout=60)
        assert sum(server.data.calls_started for server in answer.server) > 0
    with grpc.insecure_channel(trio.bridge.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channelz_pb2_grpc.ChannelzStub(channel).GetServers(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:70000", "taken"])
def test_a_bad_address_is_refused_with_the_remedy(trio: Trio, address: str) -> None:
    given = trio.bridge.metrics.removeprefix("http://").removesuffix("/metrics") if address == "taken" else address
    command = [sys.executable, "-m", "services.cli", "bridge", "--target", "127.0.0.1:1", "--metrics", given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    remedy = "choose another with --metrics HOST:PORT" if address == "taken" else "--metrics must be HOST:PORT"
    assert remedy in done.stderr


def test_servers_in_one_process_do_not_collide() -> None:
    first, second = BridgeMetrics(), BridgeMetrics()
    first.request(Statistics()).end("failed")
    for metrics, expected in ((first, 1.0), (second, 0.0)):
        assert metrics.registry.get_sample_value("draftbridge_requests_total", {"outcome": "failed"}) == expected


def declared(metrics: ServerMetrics) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Returns the type, labels and text of each of our metrics by name; names of counters end in _total."""
    found = {}
    for collector in list(metrics.registry._collector_to_names):
        families: list[Metric] = list(collector.describe()) if hasattr(collector, "describe") else []
        for family in families:
            labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith("draftbridge_"):
                found[name] = (family.type, tuple(labels), family.documentation)
    return found


BRIDGE, MODEL = declared(BridgeMetrics()), declared(ModelMetrics())


def test_the_reference_lists_every_metric() -> None:
    def rows(metrics: dict[str, tuple[str, tuple[str, ...], str]]) -> list[str]:
        return [
            f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {text} |".replace("|  |", "| |")
            for name, (kind, labels, text) in sorted(metrics.items())
        ]

    shared = {name: one for name, one in BRIDGE.items() if name in MODEL}
    parts = [
        shared,
        {n: o for n, o in BRIDGE.items() if n not in shared},
        {n: o for n, o in MODEL.items() if n not in shared},
    ]
    text = (ROOT / "docs/reference/metrics.md").read_text()
    listed = [line for line in text.splitlines() if line.startswith("| `")]
    expected = [row for part in parts for row in rows(part)]
    assert listed == expected, "docs/reference/metrics.md needs these rows:\n" + "\n".join(expected)


def test_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/draftbridge.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    known = {name: labels for name, (_, labels, _) in (BRIDGE | MODEL).items()}
    for name, (kind, labels, _) in (BRIDGE | MODEL).items():
        if kind == "histogram":
            del known[name]  # it exists only as its samples
            known |= {f"{name}_bucket": (*labels, "le"), f"{name}_sum": labels, f"{name}_count": labels}
    known["process_resident_memory_bytes"] = ()
    used: set[str] = set()
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        names, grouped = read_query(expression.replace("[$__rate_interval]", "[5m]").replace("$job", ".*"))
        assert names and names <= set(known), expression
        for name in names:
            assert grouped <= {*known[name], "job", "instance"}, expression
        used |= names
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            assert variable["query"]["query"] == "label_values(draftbridge_build_info, job)"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    # Every metric has a panel, apart from these.
    unused = set(known) - used - {"draftbridge_build_info"}
    assert {name for name in unused if not name.endswith(("_sum", "_count", "_bucket"))} == set()


def read_query(text: str) -> tuple[set[str], set[str]]:
    """Returns the names of the samples that a PromQL expression reads, and the labels that it groups by."""
    names, grouped = set(), set()

    def visit(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.MatrixSelector):
            names.add(expression.vector_selector.name)
        elif isinstance(expression, promql_parser.VectorSelector):
            names.add(expression.name)
        elif isinstance(expression, promql_parser.AggregateExpr) and expression.modifier:
            grouped.update(expression.modifier.labels)

    promql_parser.walk(promql_parser.parse(text), visit)
    return names, grouped


def test_a_pass_costs_less_than_20_microseconds() -> None:
    """Measures the cost for a forward of one sequence in a model server. A bridge counts nothing in a pass."""
    metrics, count = ModelMetrics(), 20_000
    best = float("inf")
    for _ in range(3):
        started = thread_time()
        for _ in range(count):
            metrics.on_forward(1, 5, 1_000_000)
            metrics.on_job(20_000)
        best = min(best, thread_time() - started)
    assert best / count < 20e-6


def test_a_bridge_counts_the_candidates_that_an_engine_verified_and_accepted() -> None:
    ids = list(tiny.vocabulary("sentencepiece").pieces(b"The quick brown fox jumps. " * 20).ids)
    engine = guests.Reciter(ids, len(ids) // 4)
    with guests.running() as bridge:
        guest = guests.client(bridge.address)
        guests.recite(guest, engine)
        guest.close()
        count = bridge.servicer._metrics.registry.get_sample_value
        verified, accepted = (
            count(f"draftbridge_guest_{name}_tokens_total", {"source": "suffix"}) for name in ("verified", "accepted")
        )
    assert verified and accepted
    # No step reports the last forward.
    assert 0.8 * engine.accepted["suffix"] < accepted <= min(engine.accepted["suffix"], verified)
