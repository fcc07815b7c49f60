"""Keeps one configured model service connected: connects it, watches its health, and reads it again when it changes."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from enum import Enum
from math import inf
from time import perf_counter
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge.errors import DraftBridgeError, Unreachable
from bridge.planning.estimates import TargetEstimates
from bridge.text.models import Model
from draftbridge.v1 import model_pb2
from services.bridge.endpoint import CHECK_SECONDS, ROLES, Endpoint, ModelReader
from services.errors import Exhausted, TlsFailed, TokenRefused
from services.rpc.status import RemoteError, from_rpc_error

_log = logging.getLogger(__name__)

# Minimum time between two tries to connect a service. gRPC itself reconnects a channel every 0.2 to 2 seconds.
_RETRY_SECONDS = 1.0
# At the start: the interval at which a service that does not answer is asked for the reason, and the wait after which
# the reason is logged.
_ASK_SECONDS, _PATIENCE_SECONDS = 1.0, 5.0
# A service that does not offer health checks is described again after each such pause.
_POLL_SECONDS = 5.0
# Pause after each report of good health, so that a service that sends them without end does not occupy the bridge.
_HEALTHY_SECONDS = 0.1
# Log lines per service within a period: a peer that changes all the time must not fill the log.
_MAX_LOG_LINES, _LOG_SECONDS = 8, 3600.0
# For this long after a service has accepted the bridge's token again, a call whose token it refuses fails alone.
_TRUSTED_SECONDS = 60.0
_UNHEALTHY = "reports that it cannot serve now"
# What a description may change without becoming that of another model: each start measures and draws it anew.
_OF_A_START = ("forward_costs", "instance_id")
# The factor between the times of two starts from which the speed is another one: other work disturbs them, too.
_OTHER_SPEED = 3.0


class State(Enum):
    """Whether a service can be used. AWAY: it was usable before. REFUSED: it answers, but cannot be used as it is."""

    CONNECTING = "connecting"
    AVAILABLE = "available"
    AWAY = "away"
    REFUSED = "refused"


class Connection:
    """A configured address in one role.

    `health`: a channel for health checks only, because a call that lasts would use up a part of the server's limit of
    calls on one connection.
    `known`: the model that was last connected. `description`: the latest description that the service sent. `refused`:
    the description of a service that was reached but cannot be used. `on_connected` is called with each new endpoint
    and the one before it. `loopback`: for localhost, a channel to 127.0.0.1, because gRPC reports only the reason why
    it could not connect to ::1.
    """

    def __init__(
        self,
        address: str,
        role: model_pb2.Role.ValueType,
        channel: aio.Channel,
        health: aio.Channel,
        reader: ModelReader,
        timeout: float,
        on_connected: Callable[[Endpoint, Endpoint | None], None],
        loopback: aio.Channel | None = None,
    ) -> None:
        self.address, self.role, self.channel, self._health = address, role, channel, health
        self._reader, self._timeout, self._on_connected = reader, timeout, on_connected
        self._loopback = loopback
        self.known: Endpoint | None = None
        self.description: model_pb2.Model | None = None
        self.refused: model_pb2.Model | None = None
        # The process that broke the contract, by its `instance_id`, and what it did.
        self._breach = ("", "")
        self.problem = "it has not answered yet"
        self.round_trip_ns = 0
        # Set after the first try to connect.
        self.tried = asyncio.Event()
        self._changed = asyncio.Event()
        # The kinds of problems that were logged since the service could last be used.
        self._logged: set[type[Exception]] = set()
        self._log_times: deque[float] = deque(maxlen=_MAX_LOG_LINES)
        self._pause_seconds = _RETRY_SECONDS
        # When it accepted the bridge's token again.
        self._accepted_at = -inf
        self._task: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> Endpoint | None:
        """The model that can be used now; None if there is a `problem`."""
        return None if self.problem else self.known

    @property
    def state(self) -> State:
        if not self.problem:
            return State.AVAILABLE
        if self.refused:
            return State.REFUSED
        return State.AWAY if self.known else State.CONNECTING

    async def connect(self) -> None:
        """Connects the service now, waiting for it up to the time limit.

        Raises the reason why it cannot be used, which is not logged: see `report`.
        """
        try:
            description, self.round_trip_ns = await self._awaited()
            await self._take_in(description)
        except Exception as error:
            self._set_problem(error)
            raise
        finally:
            self.tried.set()

    def start(self) -> None:
        """Connects the service in the background unless it is connected, and watches it until closed."""
        # In a context of its own: no id or trace of a request may be carried into it.
        self._task = asyncio.create_task(self._run(), context=Context())

    async def close(self, seconds: float | None = None) -> None:
        """Stops connecting and watching, and closes the channels; `seconds`: how long its streams may go on."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._health.close()
        if self._loopback:
            await self._loopback.close()
        await self.channel.close(seconds)

    def on_change(self, problem: str) -> None:
        """Handles the news that the service is not what it was: it is not used until it has been read again."""
        self.problem = problem
        self._changed.set()

    def on_error(self, error: DraftBridgeError) -> None:
        """Handles the error of a call: a service that refuses the bridge's token is not used until it accepts it.

        Watching the health does not show this, because health checks need no token. A service that has just accepted
        the token again stays in use: several processes may share its address, and some may still refuse it.
        """
        has_just_accepted = perf_counter() - self._accepted_at < _TRUSTED_SECONDS
        if isinstance(error, TokenRefused) and self.endpoint and not has_just_accepted:
            self.on_change(str(error))
            self.report(error)

    def refuse(self, problem: str) -> None:
        """Stops using a service that broke the contract, until it restarts, which changes its `instance_id`.

        One without an `instance_id` is used again when its health stream ends, or it describes itself differently.
        """
        if self.known and not self.problem:
            self.problem, self.refused = problem, self.known.description
            self._breach = self.refused.instance_id, problem
            self._report(DraftBridgeError)

    async def check(self) -> str:
        """Asks the service for its description now. Returns what is wrong with it, or ""."""
        before = self.endpoint
        if before is None:
            return self.problem
        try:
            description, self.round_trip_ns = await self._describe(CHECK_SECONDS)
        except DraftBridgeError as error:
            self.on_error(error)
            return str(error)
        if self.known is not before:  # it was connected anew meanwhile, perhaps after it had described itself here
            return self.problem
        if _same(description, before.description):
            return ""
        name = before.model.name
        problem = f"{name} at {self.address} was replaced by another model or tokenizer, which is being connected"
        self.on_change(problem)
        return problem

    async def _awaited(self) -> tuple[model_pb2.Model, int]:
        """Returns the description of a service that may not be there yet, and logs why it has not answered so far.

        Raises `TlsFailed` at once: no waiting mends a certificate.
        """
        started, reasons = perf_counter(), set[str]()
        waiting = asyncio.create_task(self._describe(self._timeout, wait=True))
        try:
            while not (await asyncio.wait((waiting,), timeout=_ASK_SECONDS))[0]:
                try:
                    await self._describe(CHECK_SECONDS)
                except TlsFailed:
                    raise
                except DraftBridgeError as error:
                    reason = str(error)
                    if perf_counter() - started > _PATIENCE_SECONDS and reason not in reasons and not waiting.done():
                        reasons.add(reason)
                        role, seconds = ROLES[self.role], self._timeout
                        self._log(f"the {role} at {self.address} is waited for, up to {seconds:g} s: {reason}")
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _describe(self, seconds: float, *, wait: bool = False) -> tuple[model_pb2.Model, int]:
        try:
            found = await self._reader.describe(self.channel, self.address, seconds, wait=wait)
        except Unreachable:
            if self._loopback:
                await self._reader.describe(self._loopback, self.address, CHECK_SECONDS)
            raise
        if wait:  # the first call may have waited for the service: only a second one shows the round trip
            found = await self._reader.describe(self.channel, self.address, CHECK_SECONDS)
        self.description = found[0]
        return found

    async def _run(self) -> None:
        while True:
            while not self.endpoint:
                try:
                    await self._try()
                except Exception as error:  # no error of one service may stop the bridge
                    self._on_failed_try(error)
                self.tried.set()
                if not self.endpoint:
                    await asyncio.sleep(self._pause_seconds)
            self._changed.clear()
            started = perf_counter()
            await self._watch()
            if not self._logged:  # it was not refused before its connection ended
                self._report(Unreachable)
            if perf_counter() - started < self._pause_seconds:
                # Its reports contradict one another: without a pause it would be connected again at once, for ever.
                await asyncio.sleep(self._pause_seconds)

    async def _try(self) -> None:
        """Connects the service. One that was refused is retried only after it has changed or was unreachable."""
        self._pause_seconds = _RETRY_SECONDS
        try:
            # Only later tries wait for a service that is not there yet: the first one must not delay the start.
            description, self.round_trip_ns = await self._describe(self._timeout, wait=self.tried.is_set())
        except Exception:
            self.refused = None
            raise
        if description.instance_id and description.instance_id == self._breach[0]:
            self.problem, self.refused = self._breach[1], description
            return
        if description == self.refused:
            return
        if self.known:
            await self._check_health()
        started = perf_counter()
        try:
            await self._take_in(description)
        except Exception as error:
            lost = isinstance(error, Unreachable | RemoteError | Exhausted)
            self.refused = None if lost else description
            # If refusing a tokenizer takes long, waiting as long limits the share of time that it costs.
            self._pause_seconds = max(perf_counter() - started, _RETRY_SECONDS)
            raise
        if self._logged and self.known:
            self._log(f"the {ROLES[self.role]} at {self.address} can be used now: it is {self.known.model.name}")
            if TokenRefused in self._logged:
                self._accepted_at = perf_counter()
            self._logged.clear()

    async def _take_in(self, description: model_pb2.Model) -> None:
        before = self.known
        if before is None or not _same(description, before.description):
            self.known = await self._reader.endpoint(self.channel, self.address, self.role, description)
            self._on_connected(self.known, before)
        elif description != before.description:  # its times only: what was learned about it stays if they are similar
            model = self._reader.model(description, before.model.vocabulary)
            self.known = replace(before, description=description, model=model)
            if _has_other_speed(model, before.model):
                self.known = replace(self.known, estimates=TargetEstimates(model.forward_costs))
                self._on_connected(self.known, before)
        self.problem, self.refused = "", None

    async def _watch(self) -> None:
        """Returns when the service cannot be used any more, or may have changed; `problem` is set then."""
        changed = asyncio.create_task(self._changed.wait())
        health = asyncio.create_task(self._until_unhealthy())
        try:
            await asyncio.wait((changed, health), return_when=asyncio.FIRST_COMPLETED)
            if health.done():
                self.problem, self.refused = self.problem or health.result(), None
        finally:
            changed.cancel()
            health.cancel()
            await asyncio.gather(changed, health, return_exceptions=True)

    async def _until_unhealthy(self) -> str:
        """Returns why the service cannot be used any more."""
        call: Any = health_pb2_grpc.HealthStub(self._health).Watch(health_pb2.HealthCheckRequest())
        try:
            # A stream that stayed open would delay the end of a server that stops.
            async for answer in call:
                if answer is None or answer.status == health_pb2.HealthCheckResponse.SERVING:
                    await asyncio.sleep(_HEALTHY_SECONDS)
                    continue
                return f"the service at {self.address} {_UNHEALTHY}"
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return await self._until_changed()
        finally:
            call.cancel()
        return f"the connection to {self.address} was lost"

    async def _until_changed(self) -> str:
        """Describes a service without health checks again and again. Returns why it cannot be used any more."""
        assert self.known, "it is connected"
        try:
            description = self.known.description
            while _same(description, self.known.description) and not self._is_restart(description):
                await asyncio.sleep(_POLL_SECONDS)
                description, self.round_trip_ns = await self._describe(CHECK_SECONDS)
        except DraftBridgeError as error:
            self.on_error(error)
            return str(error)
        return f"{self.known.model.name} at {self.address} was replaced by another model, which is being connected"

    def _is_restart(self, description: model_pb2.Model) -> bool:
        """Returns whether a service that was refused describes itself as another process."""
        return self.refused is not None and description.instance_id != self.refused.instance_id

    async def _check_health(self) -> None:
        """Raises `Unreachable` if the service reports that it cannot serve."""
        try:
            answer = await health_pb2_grpc.HealthStub(self._health).Check(
                health_pb2.HealthCheckRequest(), timeout=CHECK_SECONDS
            )
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return
            raise from_rpc_error(error, self.address) from error
        if answer is not None and answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            raise Unreachable(self.address, f"it {_UNHEALTHY}")

    def report(self, error: Exception) -> None:
        """Logs that the service cannot be used: once for each type of error, until it can be used again."""
        self._report(type(error), None if isinstance(error, DraftBridgeError) else error)

    def _report(self, kind: type[Exception], unexpected: Exception | None = None) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            role = ROLES[self.role]
            text = f"requests go on without the {role} at {self.address} until it can be used: {self.problem}"
            self._log(text, unexpected)

    def _on_failed_try(self, error: Exception) -> None:
        self._set_problem(error)
        self.report(error)

    def _set_problem(self, error: Exception) -> None:
        expected = isinstance(error, DraftBridgeError)
        self.problem = str(error) if expected else "an internal error occurred: see the bridge's log"

    def _log(self, text: str, error: Exception | None = None) -> None:
        now = perf_counter()
        if len(self._log_times) < _MAX_LOG_LINES or now - self._log_times[0] > _LOG_SECONDS:
            self._log_times.append(now)
            _log.warning(text, exc_info=error)


def _has_other_speed(one: Model, other: Model) -> bool:
    """Returns whether both starts measured their times, and these differ by more than other work explains."""
    times = [dict(model.forward_costs).get(1, 0) for model in (one, other)]
    return max(times) > _OTHER_SPEED * min(times) > 0


def _same(one: model_pb2.Model, other: model_pb2.Model) -> bool:
    """Returns whether two descriptions are of the same model: of equal descriptions but for what each start changes."""
    copies = []
    for description in (one, other):
        copy = model_pb2.Model()
        copy.CopyFrom(description)
        for name in _OF_A_START:
            copy.ClearField(name)  # type: ignore[arg-type]
        copies.append(copy)
    return copies[0] == copies[1]
