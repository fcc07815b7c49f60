"""Reads the settings of an adapter, which lives in another program's process and shares its configuration.

The engine's own configuration wins over the environment: `{"deadline_ms": 5}`, or `DRAFTBRIDGE_GUEST_DEADLINE_MS=5`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from draftbridge.guests.client import Client, open_client
from draftbridge.security import Credentials
from draftbridge.v1 import model_pb2

_PREFIX = "DRAFTBRIDGE_GUEST_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class InvalidSettings(ValueError):
    """A setting is unknown or has an invalid value. The text names it and the fix."""


@dataclass(frozen=True)
class GuestSettings:
    """Where candidates come from, and how long the engine waits for them.

    `bridge`: HOST:PORT, or "local" for candidates from the engine's own texts, without a bridge. `engine`: a name for
    logs and metrics that no other engine of this bridge has; by default one made of the host and the process. `draft`:
    one of the bridge's drafts, by default its first. `sources`: those that may propose, by default all, but "learned"
    with "local" only if it is named. `deadline_ms`: the longest that a step of the engine waits for candidates. The
    rest are the fields of `draftbridge.Credentials`.
    """

    bridge: str = "127.0.0.1:50050"
    engine: str = ""
    draft: str = ""
    sources: tuple[str, ...] = ()
    deadline_ms: float = 2.0
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_file: str = ""
    insecure: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> "GuestSettings":
        """Returns the settings of the engine's configuration and the environment. Raises `InvalidSettings`.

        A value that is None is not set.
        """
        if not isinstance(given, Mapping | None):
            example = '{"bridge": "HOST:PORT"}'
            raise InvalidSettings(f"DraftBridge's settings must be names with values, such as {example}, got {given!r}")
        defaults = {one.name: one.default for one in fields(cls)}
        named = {name[len(_PREFIX) :].lower(): environ[name] for name in environ if name.startswith(_PREFIX)}
        given = given or {}
        for name in (*named, *given):
            if name not in defaults:
                close = get_close_matches(name, defaults, 1)
                hint = f"did you mean {close[0]}?" if close else f"give one of {', '.join(defaults)}"
                raise InvalidSettings(f"DraftBridge has no setting {name!r}: {hint}")
        values = {**named, **{name: value for name, value in given.items() if value is not None}}
        return cls(**{name: _converted(name, value, defaults[name]) for name, value in values.items()})

    def of_replica(self, rank: int | None) -> "GuestSettings":
        """Returns the settings of a data-parallel replica, whose engine needs a name of its own."""
        return replace(self, engine=f"{self.engine}-dp{rank}") if self.engine and rank else self

    def open_client(self, model: model_pb2.Model, tokenizer_json: bytes) -> Client:
        """Returns the client of an adapter. Raises `InvalidSettings`."""
        try:
            return open_client(
                self.bridge,
                model,
                tokenizer_json,
                engine=self.engine,
                draft=self.draft,
                sources=self.sources,
                credentials=self.credentials,
            )
        except ValueError as error:
            raise InvalidSettings(str(error)) from error

    @property
    def credentials(self) -> Credentials:
        """Returns what the connection shows and trusts."""
        return Credentials(
            tls=self.tls,
            ca=self.ca or None,
            certificate=self.certificate or None,
            key=self.key or None,
            token_file=self.token_file or None,
            insecure=self.insecure,
        )


def _converted(name: str, value: Any, default: Any) -> Any:
    """Returns a value in the type of its default. Raises `InvalidSettings`."""
    if isinstance(default, bool):
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise InvalidSettings(f"DraftBridge's setting {name} must be true or false, got {value!r}")
        return text in _TRUE
    if isinstance(default, float):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= 10_000:
            raise InvalidSettings(f"DraftBridge's setting {name} must be a number from 0 to 10000, got {value!r}")
        return number
    if isinstance(default, tuple):
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise InvalidSettings(f"DraftBridge's setting {name} must be a list of names, got {value!r}")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    return str(value)
