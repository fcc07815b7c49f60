"""The zoo: all models that a bridge is configured with, found by name, and who may be paired with whom.

A bridge does not start if none of its targets answers. Models may come, go and change while it runs: see `connection`.
A host name stands for the services at all its addresses: see `entry`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType

from bridge.errors import DraftBridgeError, Unreachable
from bridge.text.models import Model
from bridge.text.vocabulary import Vocabulary
from draftbridge.security import Credentials
from draftbridge.v1 import bridge_pb2, model_pb2
from services.bridge.connection import Connection
from services.bridge.endpoint import CHECK_SECONDS, ROLES, Endpoint, ModelReader, key_of
from services.bridge.entry import Entry
from services.bridge.names import Resolver, host_name, is_localhost, resolve, with_ip
from services.errors import DraftAway, ModelChanged, ModelNotFound
from services.rpc.channel import open_channel

_log = logging.getLogger(__name__)

# At its start, a bridge waits this much longer than `timeout` for drafts: reading tokenizers takes time too.
_START_SECONDS = 20.0
# Reasons with which a stream fails if the address serves another model than before.
_CHANGED = (ModelChanged.reason, ModelNotFound.reason)


class Zoo:
    """Connects to model services and finds models by name.

    `resolver` looks up host names, every `resolve_interval` seconds. `on_retired` receives the address of a service
    that left its name.
    """

    def __init__(
        self,
        targets: Sequence[str],
        drafts: Sequence[str],
        timeout: float = 10.0,
        credentials: Credentials | None = None,
        keepalive_seconds: float = 20.0,
        resolve_interval: float = 5.0,
        resolver: Resolver = resolve,
    ) -> None:
        self._keepalive_seconds = keepalive_seconds
        self._addresses = [(address, model_pb2.ROLE_TARGET) for address in targets]
        self._addresses += [(address, model_pb2.ROLE_DRAFT) for address in drafts]
        self._credentials, self._timeout = credentials, timeout
        self._resolver, self._resolve_interval = resolver, resolve_interval
        self.reader = ModelReader()
        self._entries: list[Entry] = []
        self.on_retired: Callable[[str], None] = lambda address: None
        # Called with the key of a draft whose speed may be another one than before.
        self.on_other_draft: Callable[[str], None] = lambda key: None

    @property
    def connections(self) -> list[Connection]:
        """All configured services, in the order of the configuration."""
        return [one for entry in self._entries for one in entry.connections]

    async def connect(self) -> "Zoo":
        """Returns the zoo itself when all services were tried once, up to a time limit, and a target is connected.

        Raises the error of a target if none can be used: `RoleNotServed`, `UnusableModel`, ..., or `Unreachable`.
        Other services that fail are logged and retried in the background.
        """
        for address, role in self._addresses:
            connect = partial(self._connection, address, role)
            self._entries.append(Entry(address, connect, lambda one: self.on_retired(one), self._resolver))
        roles = [role for _, role in self._addresses]
        found = [
            entry.find(self._timeout, wait=role == model_pb2.ROLE_TARGET)
            for entry, role in zip(self._entries, roles, strict=True)
        ]
        await asyncio.gather(*found)
        await self._connect_targets()
        for entry in self._entries:
            entry.start(self._resolve_interval)
        first_tries = [asyncio.create_task(one.tried.wait()) for one in self._of(model_pb2.ROLE_DRAFT)]
        try:
            if first_tries:
                await asyncio.wait(first_tries, timeout=self._timeout + _START_SECONDS)
        finally:
            for task in first_tries:
                task.cancel()
        return self

    def _connection(self, address: str, role: model_pb2.Role.ValueType, ip: str) -> Connection:
        """Returns a connection to an address, or if `ip` is given, to one of those that its host name has."""
        at, shown, timeout = address, address, self._timeout
        if ip:
            at, shown = with_ip(address, ip), f"{address} ({ip})"
        elif host_name(address):  # it was waited for already
            timeout = min(timeout, CHECK_SECONDS)
        options = (self._credentials, address if ip else "", self._keepalive_seconds)
        channel, health = (open_channel(at, *options) for _ in range(2))
        loopback = None
        if is_localhost(address):
            named = (self._credentials, address, self._keepalive_seconds)
            loopback = open_channel(with_ip(address, "127.0.0.1"), *named)
        return Connection(shown, role, channel, health, self.reader, timeout, self._on_connected, loopback)

    async def _connect_targets(self) -> None:
        targets, logged = self._of(model_pb2.ROLE_TARGET), list[Connection]()
        tasks = [asyncio.create_task(one.connect()) for one in targets]
        waiting: set[asyncio.Task[None]] = set(tasks)
        try:
            while waiting and not any(task.done() and not task.exception() for task in tasks):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one, task in zip(targets, tasks, strict=True):
                    refused = task in done and type(task.exception()) not in (NoneType, Unreachable)
                    if refused and waiting:  # for the others, perhaps for long
                        _log.warning("the target at %s cannot be used: %s", one.address, one.problem)
                        logged.append(one)
            if waiting:  # the others may be loading for minutes, and are connected later
                await asyncio.wait(waiting, timeout=CHECK_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [(one, error) for one, error in zip(targets, results, strict=True) if isinstance(error, Exception)]
        if failed and len(failed) == len(targets):
            # One reason is raised, and the caller prints it.
            raised = next((error for _, error in failed if not isinstance(error, Unreachable)), failed[0][1])
            for one, error in failed:
                if error is not raised and one not in logged:
                    _log.warning("the target at %s cannot be used: %s", one.address, one.problem)
            raise raised
        for one, error in failed:
            if one not in logged:
                one.report(error)

    def _on_connected(self, endpoint: Endpoint, before: Endpoint | None) -> None:
        """Forgets what was learned about a draft that may have another speed than before."""
        others = [one.known for one in self._of(model_pb2.ROLE_DRAFT) if one.known is not endpoint]
        key = key_of(endpoint)
        further_replica = before is None and any(one and key_of(one) == key for one in others)
        if endpoint.role == model_pb2.ROLE_DRAFT and not further_replica:
            for one in self._of(model_pb2.ROLE_TARGET):
                if one.known:
                    one.known.estimates.forget_draft(key)
            self.on_other_draft(key)

    async def close(self) -> None:
        """Stops connecting services, closes the channels, and ends the processes of the sandbox."""
        await asyncio.gather(*(entry.close() for entry in self._entries))
        await self.reader.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """The usable services: targets, then drafts, each in the order of the configuration."""
        # Metrics call this in another thread: meanwhile, a service may connect or leave.
        usable = [endpoint for one in self.connections if (endpoint := one.endpoint)]
        owners = self._owners()
        return [one for one in usable if owners.get((one.role, one.model.name), one).identity == one.identity]

    def _owners(self) -> dict[tuple[model_pb2.Role.ValueType, str], Endpoint]:
        """Returns the services whose models have their names, by role and name: the first that are known."""
        known = [one.known for one in self.connections if one.known]
        return {(one.role, one.model.name): one for one in reversed(known)}

    def conflict(self, connection: Connection) -> str:
        """Returns why a connected model cannot be used beside the others, or "".

        A name belongs to the first service in the order of the configuration that had it in that role, even while that
        service is away: its requests must not go to another model.
        """
        endpoint = connection.endpoint
        if endpoint is None:
            return ""
        owner = self._owners().get((endpoint.role, endpoint.model.name))  # None if it has just left its host name
        if owner is None or owner.identity == endpoint.identity:
            return ""
        what = "tokenizer" if owner.identity[1] == endpoint.identity[1] else "revision"
        return (
            f"two models are named {owner.model.name}: this one differs in its {what} from the one at {owner.address}, "
            "which has the name; serve one of them under another name with --name"
        )

    def target(self, name: str) -> Endpoint:
        """Returns the target with this name, or the first one if the name is empty. Raises `ModelNotFound`.

        A target that is away is returned too, so that its request fails with the reason: no other model replaces it.
        """
        configured = [one.known for one in self._of(model_pb2.ROLE_TARGET) if one.known]
        name = name or next((one.model.name for one in configured), "")
        return self._find(name, [*self.of_role(model_pb2.ROLE_TARGET), *configured], "target")

    def draft(self, name: str) -> Endpoint | None:
        """Returns the draft with this name. If the name is empty: the first draft, or None if no draft is connected.

        Raises `ModelNotFound`, or `DraftAway` if a configured draft that is not connected may have this name.
        """
        drafts = self.of_role(model_pb2.ROLE_DRAFT)
        if not name and not drafts:
            return None
        try:
            return self._find(name, drafts, "draft")
        except ModelNotFound:
            for one in self._of(model_pb2.ROLE_DRAFT):
                # A draft that has never answered may have any name.
                if not one.endpoint and (not one.description or one.description.name == name):
                    raise DraftAway(name, one.address, one.problem) from None
            raise

    @property
    def note_on_drafts(self) -> str:
        """Explains why requests run without a draft. Empty if a draft is connected, or if no draft is configured."""
        drafts = self._of(model_pb2.ROLE_DRAFT)
        if not drafts or self.of_role(model_pb2.ROLE_DRAFT):
            return ""
        addresses = ", ".join(one.address for one in drafts)
        return f"no draft is connected (configured: {addresses}); the target decoded alone"

    def model(self, name: str) -> Model:
        """Returns the target with this name or, failing that, the draft, even if it is away. Raises `ModelNotFound`."""
        return self._find(name, [one.known for one in self.connections if one.known], "model").model

    def of_role(self, role: model_pb2.Role.ValueType) -> list[Endpoint]:
        """Returns the usable services of a role."""
        return [endpoint for endpoint in self.endpoints if endpoint.role == role]

    def vocabularies(self) -> list[Vocabulary]:
        """Returns the tokenizers in use, each once."""
        return list(
            {endpoint.model.vocabulary.sha256: endpoint.model.vocabulary for endpoint in self.endpoints}.values()
        )

    def connected(self) -> list[tuple[str, str, bool]]:
        """Returns the address and the role of each configured service, and whether it is connected."""
        return [(one.address, ROLES[one.role], one.endpoint is not None) for one in self.connections]

    async def check(self) -> list[bridge_pb2.Endpoint]:
        """Checks all configured services concurrently, and returns for each what is wrong with it now, if anything."""

        async def checked(one: Connection) -> bridge_pb2.Endpoint:
            problem = await one.check() or self.conflict(one)
            model = one.description.name if one.description else ""
            return bridge_pb2.Endpoint(
                address=one.address, role=one.role, reachable=not problem, problem=problem, model=model
            )

        return await asyncio.gather(*map(checked, self.connections))

    def replicas(self, endpoint: Endpoint) -> list[Endpoint]:
        """Returns the usable services of the same role, revision and tokenizer; at least this one."""
        found = [one for one in self.of_role(endpoint.role) if one.identity == endpoint.identity]
        return found or [endpoint]

    def on_error(self, endpoint: Endpoint, error: DraftBridgeError) -> None:
        """Handles the error of a service's stream. If the address serves another model now, connects that instead."""
        for one in self.connections:
            if (one.address, one.role) != (endpoint.address, endpoint.role):
                continue
            one.on_error(error)
            if error.reason in _CHANGED:
                one.on_change(f"{endpoint.model.name} was replaced by another model, which is being connected")

    def refuse(self, endpoint: Endpoint, problem: str) -> None:
        """Stops using a service that broke the contract; see `Connection.refuse`."""
        for one in self.connections:
            now = one.endpoint  # it may have been described anew, with other times
            if now and (now.address, now.role, now.identity) == (endpoint.address, endpoint.role, endpoint.identity):
                one.refuse(problem)

    def _of(self, role: model_pb2.Role.ValueType) -> list[Connection]:
        return [one for one in self.connections if one.role == role]

    @staticmethod
    def _find(name: str, candidates: Sequence[Endpoint], kind: str) -> Endpoint:
        for endpoint in candidates:
            if name == endpoint.model.name or (not name and kind != "model"):
                return endpoint
        names = ", ".join(dict.fromkeys(endpoint.model.name for endpoint in candidates))
        raise ModelNotFound(no_such(name, names, kind), model=name)


def no_such(name: str, names: str, kind: str = "target") -> str:
    """Returns that a bridge has no model `name` among `names`, and what to do."""
    if kind == "target" and not names:
        return "this bridge has no target, so it only serves candidates to engines: start it with --target HOST:PORT"
    return f"this bridge has no {kind} {name!r}: it has {names or 'none'}"
