"""Checks a deployment end to end, and recommends changes, most important first, for `draftbridge doctor`."""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from time import perf_counter_ns
from typing import Any

import grpc

from draftbridge import CallError, Client, Generation
from draftbridge.security import is_local
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli.bench import WORTH_IT
from services.version import VERSION

# A message between bridge and service that takes longer than this share of a pass slows every pass down.
_MAX_ROUND_TRIP_SHARE = 0.2
# A pass of eight tokens that costs more than this many passes of one makes candidates expensive.
_STEEP = 3.0
_LOW_ACCEPTANCE = 0.4
_PROMPT = "Write a short Python function that returns the sum of the even numbers in a list, and explain it."
_TOKENS, _CHAT_TOKENS, _PINGS = 48, 4, 5
# With these reasons, a chat fails in its template.
_TEMPLATE_REASONS = ("INVALID_FIELD", "UNUSABLE_MODEL", "TEMPLATE_LIMIT_EXCEEDED")
_LOG = "look at its server's log"
_CONNECT_SECONDS = 3.0


class Level(IntEnum):
    """How important a finding is.

    BROKEN: requests fail. DEGRADED: they succeed, but a part is lost or does not fit the others. SLOW: they succeed,
    but could be faster. GOOD: nothing is to be changed.
    """

    BROKEN = 0
    DEGRADED = 1
    SLOW = 2
    GOOD = 3


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy`: what to change; empty if nothing."""

    level: Level
    check: str
    text: str
    remedy: str = ""


def examine(
    address: str, connect: Callable[[str], Client], on_finding: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Returns all findings, the most important first; a check that others need ends the examination if it fails.

    `on_finding` receives each of them at once: generating texts takes a while. Raises what `connect` raises.
    """
    found = []
    for one in _examine(address, connect):
        found.append(one)
        on_finding(one)
    return sorted(found, key=lambda one: one.level)


def _examine(address: str, connect: Callable[[str], Client]) -> Iterator[Finding]:
    port = _port(address)
    yield port
    if port.level is Level.BROKEN:
        return
    with connect(address) as client:
        try:
            status = client.status()
            yield Finding(Level.GOOD, "connection", f"a bridge answers at {address}")
            services = [_checked(one, status) for one in client.services()]
            pairs = client.pairs()
            yield from _versions(status, services)
            yield from _services(services)
            yield from _tokenizers(services)
            yield from _replicas(services)
            yield from _round_trips(client, services)
            yield from _costs(services)
            yield from _pairs(services, pairs)
            yield from _templates(client, services)
            yield from _gains(client, services, pairs)
        except CallError as error:
            yield _failed(address, error)


def _port(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return Finding(Level.GOOD, "port", f"{address} accepts connections")
    except (OSError, ValueError, OverflowError) as error:
        return Finding(
            Level.BROKEN,
            "port",
            f"nothing listens at {address} ({error})",
            "start a bridge there (draftbridge up, or draftbridge bridge), or give its address with --server",
        )


def _failed(address: str, error: CallError) -> Finding:
    remedies = {
        "TLS_FAILED": "give --ca with the authority of the bridge's certificate, or --tls if it is a public one",
        "UNAUTHENTICATED": "give --token-file with a token that the bridge knows",
        "NOT_A_BRIDGE": "this is another kind of server: give the address of the bridge",
        "SERVICE_UNREACHABLE": "if the bridge uses TLS, give --tls or --ca; otherwise look at its log",
    }
    remedy = remedies.get(error.reason, "")
    return Finding(Level.BROKEN, "connection", f"a call to the bridge at {address} failed: {error}", remedy)


def _versions(status: bridge_pb2.GetStatusResponse, services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    versions = {"this command": VERSION, "the bridge": status.version}
    versions |= {f"the service at {one.address}": one.model.server_version for one in services}
    different = {who: version for who, version in versions.items() if version and version != status.version}
    if not different:
        yield Finding(Level.GOOD, "versions", f"all parts that say so are version {status.version}")
        return
    others = ", ".join(f"{who} {version}" for who, version in different.items())
    yield Finding(
        Level.DEGRADED,
        "versions",
        f"the bridge is version {status.version}, but {others}",
        "install one version everywhere",
    )


def _checked(service: bridge_pb2.ServiceState, status: bridge_pb2.GetStatusResponse) -> bridge_pb2.ServiceState:
    """Returns the service as it answered the bridge just now; the list of models may not know yet that it hangs."""
    place = (service.address, service.role)
    problem = next((one.problem for one in status.endpoints if (one.address, one.role) == place), "")
    if not problem or service.state != service.STATE_AVAILABLE:
        return service
    away = bridge_pb2.ServiceState()
    away.CopyFrom(service)
    away.state, away.problem = service.STATE_AWAY, problem
    return away


def _services(services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    states = bridge_pb2.ServiceState
    # A service that has never answered has no name. It may be a replica of these.
    targets = {one.name for one in _usable(services, model_pb2.ROLE_TARGET)}
    targets |= {""} if targets else set()
    if not any(one.role == model_pb2.ROLE_TARGET for one in services):
        text = "no target is configured: the bridge serves candidates to engines, and cannot generate"
        yield Finding(Level.DEGRADED, "services", text, "to generate, start the bridge with --target HOST:PORT")
    for one in services:
        role = model_pb2.Role.Name(one.role).removeprefix("ROLE_").lower()
        if one.state == states.STATE_AVAILABLE:
            yield Finding(Level.GOOD, "services", f"the {role} {one.model.name} at {one.address} can be used")
            continue
        state = states.State.Name(one.state).removeprefix("STATE_").lower()
        needed = one.role == model_pb2.ROLE_TARGET and one.model.name not in targets
        level = Level.BROKEN if needed else Level.DEGRADED
        remedy = "start it, and check that the bridge's machine reaches this address" if not one.model.name else ""
        yield Finding(
            level,
            "services",
            f"the {role} at {one.address} is {state}: {one.problem}",
            remedy or "see the problem's text",
        )


def _tokenizers(services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    by_name: dict[str, dict[str, str]] = {}
    for one in services:
        if one.state == one.STATE_AVAILABLE:
            by_name.setdefault(one.model.name, {})[one.model.tokenizer_sha256] = one.address
    for name, found in by_name.items():
        if len(found) == 1:
            yield Finding(Level.GOOD, "tokenizers", f"{name}: the checksum is {next(iter(found))[:12]}... everywhere")
            continue
        checksums = ", ".join(f"{sha256[:12]}... at {address}" for sha256, address in found.items())
        remedy = "serve the same files everywhere, or one of them under another --name"
        yield Finding(Level.DEGRADED, "tokenizers", f"services named {name} have different ones: {checksums}", remedy)


def _replicas(services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    by_model: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in services:
        if one.role == model_pb2.ROLE_TARGET and one.state == one.STATE_AVAILABLE:
            # Which of several devices of one kind makes no difference.
            model, kind = one.model, one.model.device.partition(":")[0]
            way = f"{model.engine}, {kind}, {model.dtype}"
            by_model.setdefault((model.name, model.revision, model.tokenizer_sha256), {})[way] = one.address
    for (name, *_), found in by_model.items():
        if len(found) > 1:
            ways = "; ".join(f"{way} at {address}" for way, address in found.items())
            yield Finding(
                Level.DEGRADED,
                "replicas",
                f"replicas of {name} compute differently: {ways}. So a seed's text can depend on the replica",
                "serve all with the same --engine, --dtype and --weights (draftbridge engines)",
            )


def _round_trips(client: Client, services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    taken, round_trips = [], defaultdict[tuple[str, int], list[int]](list)
    for _ in range(_PINGS):
        client.status()  # the bridge measures its round trips anew; a single one may have met other work
        started = perf_counter_ns()
        answer = client.services()
        taken.append(perf_counter_ns() - started)
        for one in answer:
            round_trips[one.address, one.role].append(one.round_trip_ns)
    text = f"a call to the bridge and back takes {median(taken) / 1e6:.1f} ms"
    yield Finding(Level.GOOD, "round trips", text)
    passes = [ns for one in services if (ns := _costs_of(one).get(1, 0)) and one.role == model_pb2.ROLE_TARGET]
    if not passes:
        return
    for one in services:
        round_trip_ns = median(round_trips[one.address, one.role] or [0])
        if round_trip_ns > _MAX_ROUND_TRIP_SHARE * min(passes) and one.state == one.STATE_AVAILABLE:
            near = "look for programs that use the cores of the bridge or of the service, which are on one machine"
            far = "run the bridge on the target's machine, and the draft near it"
            yield Finding(
                Level.SLOW,
                "round trips",
                f"a call from the bridge to {one.model.name} at {one.address} takes {round_trip_ns / 1e6:.1f} ms; "
                f"a pass of the fastest target takes {min(passes) / 1e6:.1f} ms",
                near if is_local(one.address) else far,
            )


def _costs_of(service: bridge_pb2.ServiceState) -> dict[int, int]:
    return {one.token_count: one.forward_ns for one in service.measured_costs or service.model.forward_costs}


def _costs(services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    for one in services:
        costs = _costs_of(one)
        if one.role != model_pb2.ROLE_TARGET or not costs.get(1) or not costs.get(8):
            continue
        factor = costs[8] / costs[1]
        text = (
            f"{one.model.name} ({one.model.engine}, {one.model.dtype}): a pass takes {costs[1] / 1e6:.1f} ms, one of "
        )
        text += f"8 tokens {factor:.1f} times as long"
        if factor > _STEEP:
            remedy = "candidates are expensive: try another engine or --weights (draftbridge engines), or more cores"
            yield Finding(Level.SLOW, "costs", text, remedy)
        else:
            yield Finding(Level.GOOD, "costs", text)


def _pairs(services: Sequence[bridge_pb2.ServiceState], pairs: Sequence[bridge_pb2.Pair]) -> Iterator[Finding]:
    if not any(one.role == model_pb2.ROLE_DRAFT for one in services):
        remedy = "texts that repeat little gain only from a model: `draftbridge serve MODEL --role draft --engine auto`"
        remedy += ", and give its address to the bridge with --draft"
        yield Finding(Level.SLOW, "pairs", "no draft is configured: only prompt lookup proposes candidates", remedy)
    served = {pair.target for pair in pairs if not pair.refusal}
    targets = {one.name for one in _usable(services, model_pb2.ROLE_TARGET)}
    drafts = {one.name for one in _usable(services, model_pb2.ROLE_DRAFT)}
    for pair in pairs:
        # A service that cannot be used is a finding by itself.
        if not pair.refusal or pair.target not in targets or pair.draft not in drafts:
            continue
        text = f"{pair.draft} is not used beside {pair.target}: {pair.refusal}"
        if pair.target in served:
            yield Finding(Level.GOOD, "pairs", f"{text}; {pair.target} has other drafts")
        else:
            yield Finding(Level.SLOW, "pairs", text, "give the bridge a --draft that another server runs")


def _templates(client: Client, services: Sequence[bridge_pb2.ServiceState]) -> Iterator[Finding]:
    for model in _usable(services, model_pb2.ROLE_TARGET):
        if not model.chat_template:
            text = f"{model.name} has no chat template: chats reach it as a plain transcript"
            yield Finding(Level.GOOD, "template", text)
            continue
        try:
            client.generate(
                messages=[{"role": "user", "content": "Hello"}],
                target=model.name,
                max_tokens=_CHAT_TOKENS,
                speculation="off",
            )
            yield Finding(Level.GOOD, "template", f"{model.name} renders a chat with its own template")
        except CallError as error:
            remedy = "fix the model's chat template" if error.reason in _TEMPLATE_REASONS else _LOG
            yield _failure("template", f"a chat with {model.name}", error, remedy)


def _gains(
    client: Client, services: Sequence[bridge_pb2.ServiceState], pairs: Sequence[bridge_pb2.Pair]
) -> Iterator[Finding]:
    """Generates a small text with each target, alone and with every draft, and judges each pair."""
    for model in _usable(services, model_pb2.ROLE_TARGET):
        try:
            alone = _run(client, model.name, speculation="off")
        except CallError as error:
            yield _failure("generation", f"a text of {model.name}", error, _LOG)
            continue
        yield Finding(Level.GOOD, "generation", f"{model.name} alone generates {_speed(alone):.1f} tokens/s")
        for pair in pairs:
            if pair.target == model.name and not pair.refusal:
                yield from _judge(client, pair, alone)


def _judge(client: Client, pair: bridge_pb2.Pair, alone: Generation) -> Iterator[Finding]:
    name = f"{pair.draft} beside {pair.target}"
    try:
        options: dict[str, Any] = {"draft": pair.draft, "sources": ["draft"]}
        _run(client, pair.target, **options)  # the bridge learns the costs of the pair
        drafted = _run(client, pair.target, **options)
        statistics = client.generate(
            _PROMPT, target=pair.target, draft=pair.draft, max_tokens=_TOKENS, ignore_eos=True, speculation="lockstep",
            num_assistant_tokens=4,
        ).finished.speculation  # fmt: skip
    except CallError as error:
        yield _failure("drafts", name, error, "look at the log of the draft's server", Level.DEGRADED)
        return
    if drafted.text != alone.text and not any(one.finished.speculation.near_ties for one in (alone, drafted)):
        remedy = "this is a bug of an engine: serve the target with --deterministic and report it"
        yield Finding(Level.BROKEN, "losslessness", f"{name}: the text differs from that of the target alone", remedy)
    if statistics.note:
        yield Finding(Level.DEGRADED, "drafts", f"{name}: {statistics.note}", "look at the log of the draft's server")
    candidates = statistics.num_draft_tokens
    if not candidates:
        if not statistics.note:
            remedy = "prompt lookup proposes only what a text repeats; for a model, look at the log of its server"
            yield Finding(Level.SLOW, "drafts", f"{name}: it proposed no candidate for a small text", remedy)
        return
    acceptance = statistics.num_accepted_tokens / candidates
    gain = _speed(drafted) / _speed(alone) if _speed(alone) else 0.0
    found = f"{name}: {gain:.2f}x the target alone on a small text, {acceptance:.0%} of candidates accepted"
    if gain >= WORTH_IT:
        yield Finding(Level.GOOD, "drafts", f"{found}: it is worth it")
    elif acceptance < _LOW_ACCEPTANCE:
        remedy = "choose a draft trained on similar text, or leave it out: prompt lookup needs no model"
        yield Finding(Level.SLOW, "drafts", f"{found}: it is not worth it, because it is often wrong", remedy)
    else:
        remedy = "run the draft on other cores or a faster engine; `draftbridge zoo measure` compares all pairs"
        yield Finding(Level.SLOW, "drafts", f"{found}: it is not worth it, because it takes too long", remedy)


def _failure(check: str, what: str, error: CallError, remedy: str, level: Level = Level.BROKEN) -> Finding:
    """Returns what a failed generation shows. A server without room for it is busy, not broken."""
    if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Finding(level, check, f"{what} fails: {error}", remedy)
    remedy = "run this command again when fewer requests run, or raise the limit that is reached"
    return Finding(Level.DEGRADED, check, f"{what} is not checked: {error}", remedy)


def _run(client: Client, target: str, **options: Any) -> Generation:
    # A model may end this text at once, and a single token has no speed.
    return client.generate(_PROMPT, target=target, max_tokens=_TOKENS, ignore_eos=True, **options)


def _speed(generation: Generation) -> float:
    """Returns tokens per second after the first pass."""
    return generation.finished.speculation.measured_tokens_per_second


def _usable(services: Sequence[bridge_pb2.ServiceState], role: int) -> list[model_pb2.Model]:
    """Returns the available models of a role, each once."""
    available = bridge_pb2.ServiceState.STATE_AVAILABLE
    models: Mapping[str, model_pb2.Model] = {
        one.model.name: one.model for one in services if one.role == role and one.state == available
    }
    return list(models.values())
