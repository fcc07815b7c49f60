"""Starts the models of a zoo and a bridge, or reads those of a running bridge."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bridge.errors import InvalidField
from draftbridge import Client
from draftbridge.v1 import model_pb2
from services.cli.bench import by
from services.cli.connection import Connect
from services.cli.processes import fetch, launched, private_environment, serve, server_options
from services.cli.terminal import report
from services.cli.zoo.predict import Times
from services.cli.zoo.samples import Models
from services.engines.registry import AUTO
from services.interrupts import as_interrupts
from services.store.built_in import SUFFIX
from services.store.resolve import default_name

DEFAULT_MODELS = "gemma-3-270m,smollm2-135m-instruct"


@dataclass(frozen=True)
class Zoo:
    """A running zoo: a client of its bridge, its usable models, and the names of all its targets and drafts.

    `times`: those of `models`. `refused`: why a pair cannot run, or with an empty draft, why a target cannot.
    """

    client: Client
    models: Models
    times: Mapping[tuple[str, str], Times]
    targets: Sequence[str]
    drafts: Sequence[str]
    overlaps: Mapping[tuple[str, str], float]
    refused: Mapping[tuple[str, str], str]


@contextmanager
def running(
    connect: Connect, server: str, targets: str | None, drafts: str | None, engine: str | None
) -> Iterator[Zoo]:
    """Starts all models and a bridge, or connects to a running one, whose models are all taken if none are named.

    Prints a line for each service that cannot be used.
    """
    named, drafting = _names("--targets", targets), _names("--drafts", drafts)
    with ExitStack() as stack:
        if server:
            if engine:
                raise InvalidField("--engine", "left out with --server: the models of a running bridge are as they are")
            client = stack.enter_context(connect(server))
            yield _read(client, named, drafting, {})
            return
        wanted = named or DEFAULT_MODELS.split(",")
        address, served = stack.enter_context(_fleet(wanted, drafting or wanted, engine))
        yield _read(stack.enter_context(Client(address)), [], [], served)


def _read(client: Client, targets: Sequence[str], drafts: Sequence[str], served: Mapping[str, str]) -> Zoo:
    """Reads the zoo of a bridge. `served`: the models of addresses as they were started."""
    models: dict[tuple[str, str], model_pb2.Model] = {}
    problems = {}
    names: dict[str, dict[str, None]] = {"target": {}, "draft": {}}
    for one in client.services():
        role = "target" if one.role == model_pb2.ROLE_TARGET else "draft"
        name = one.model.name or served.get(one.address, one.address)
        names[role][name] = None
        if one.state == one.STATE_AVAILABLE:
            models.setdefault((role, name), one.model)
            continue
        problems[role, name] = f"the {role} at {one.address} cannot be used: {one.problem}"
        report(f"{name}: {problems[role, name]}")
    for place in models:
        problems.pop(place, None)
    all_targets = _known(targets, list(names["target"]), "--targets")
    all_drafts = _known(drafts, list(names["draft"]), "--drafts")
    pairs = client.pairs()
    refused = {(one.target, one.draft): one.refusal for one in pairs if one.refusal}
    for target in all_targets:
        problem = problems.get(("target", target), "")
        for draft in ("", *all_drafts):
            if found := problem or problems.get(("draft", draft), ""):
                refused[target, draft] = found
    return Zoo(
        client,
        {place: _described(model) for place, model in models.items()},
        {place: _times(model) for place, model in models.items()},
        all_targets,
        all_drafts,
        {(one.target, one.draft): one.vocabulary_overlap for one in pairs},
        refused,
    )


@contextmanager
def _fleet(targets: Sequence[str], drafts: Sequence[str], engine: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Runs a server for each model, in the roles that it needs, and a bridge.

    Yields the bridge's address, and the models by the addresses of their servers.
    """
    models = list(dict.fromkeys((*targets, *drafts)))
    if SUFFIX in targets:
        raise InvalidField("--targets", f"models with a text of their own, not {SUFFIX}", ", ".join(targets))
    for name, ones in by(models, default_name).items():
        if len(ones) > 1:
            raise InvalidField("--targets and --drafts", "models with different names", f"{name} for {', '.join(ones)}")
    environment = private_environment()
    chosen = server_options(models[0], environment, {"engine": AUTO}, engine=engine)
    fetch(targets, drafts, report, trusted=chosen.trusted)
    with ExitStack() as stack:
        stack.enter_context(as_interrupts())
        options: list[str] = []
        served = {}
        for number, model in enumerate(models, start=1):
            report(f"starting {model} ({number} of {len(models)})")
            role = "both" if model in targets and model in drafts else "target" if model in targets else "draft"
            own = () if model == SUFFIX else chosen.words
            words = ("--role", role, "--name", default_name(model), *own)
            address, _ = stack.enter_context(serve(model, *words, environment=environment))
            served[address] = model
            options += ["--target", address] if model in targets else []
            options += ["--draft", address] if model in drafts else []
        words = ("bridge", *options, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        yield stack.enter_context(launched("bridge", *words, environment=environment))[0], served


def _described(model: model_pb2.Model) -> dict[str, Any]:
    return {
        "revision": model.revision,
        "engine": model.engine,
        "device": model.device,
        "dtype": model.dtype,
        "context_length": model.context_length,
        "vocabulary_size": model.vocabulary_size,
        "costs": [[one.token_count, one.forward_ns] for one in model.forward_costs],
    }


def _times(model: model_pb2.Model) -> Times:
    costs = tuple((one.token_count, one.forward_ns) for one in model.forward_costs)
    return Times(costs, frozenset(model.compute_units), model.compute_unit_count)


def _names(option: str, text: str | None) -> list[str]:
    """Returns the names of an option; none if it is not given. Raises `InvalidField` if it is given without any."""
    names = [one.strip() for one in (text or "").split(",") if one.strip()]
    if text is not None and not names:
        raise InvalidField(option, "names with commas between them", repr(text))
    return names


def _known(wanted: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """Returns the names that are wanted, all known ones if that is none. Raises `InvalidField` for an unknown one."""
    for name in wanted:
        if name not in known:
            raise InvalidField(option, f"names that the bridge has ({', '.join(known)})", name)
    return list(wanted) or list(known)
