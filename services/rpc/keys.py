"""Keys: the bearer tokens that a server accepts, with a name and limits for each."""

import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from draftbridge.security import is_token
from services.config import InvalidConfiguration
from services.config_reading import allowed, line_of, unknown
from services.errors import KeyLimitReached, Unauthenticated

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_MIN_TOKEN_LENGTH = 16


def _matching(pattern: str, meaning: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(meaning)
        return value

    return AfterValidator(check)


def _token(value: SecretStr) -> SecretStr:
    if len(value) < _MIN_TOKEN_LENGTH or not is_token(value.get_secret_value()):
        raise ValueError(f"at least {_MIN_TOKEN_LENGTH} printable ASCII characters without spaces")
    return value


_Name = Annotated[str, _matching(r"[A-Za-z0-9_.-]{1,64}", "a name of 1 to 64 ASCII letters, digits and _.-")]
_Token = Annotated[SecretStr, AfterValidator(_token)]
_Sha256 = Annotated[str, _matching(r"[0-9a-f]{64}", "64 digits and letters from a to f")]
_TIME = "a time with its zone, such as 2030-01-01T00:00:00Z, without quotes"
# What pydantic's errors of these types leave open.
_ALLOWED = {
    "timezone_aware": _TIME,
    "datetime_type": _TIME,
    "model_type": "a table, as [NAME]",
}


class _Settings(BaseModel):
    """One table of a keys file."""

    # Strict, because otherwise `true` is a limit of 1, and the number 20300101 a time in 1970.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-")
    )

    token: _Token | None = None
    token_sha256: _Sha256 | None = None
    concurrent_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, le=1_000_000_000)
    expires: AwareDatetime | None = None

    @property
    def digest(self) -> str:
        assert self.token or self.token_sha256
        return self.token_sha256 or _digest(self.token.get_secret_value() if self.token else "")


class _File(BaseModel):
    keys: dict[_Name, _Settings]


@dataclass
class Usage:
    """What the requests of one key use. `balance`: tokens that it may still generate, refilled over a minute."""

    running: int = 0
    translating: int = 0
    balance: float | None = None
    refilled: float = 0.0

    def refill(self, per_minute: int) -> float:
        """Returns the balance now."""
        now = time.monotonic()
        if self.balance is None:
            self.balance = float(per_minute)
        self.balance = min(float(per_minute), self.balance + (now - self.refilled) * per_minute / 60)
        self.refilled = now
        return self.balance


@dataclass(frozen=True)
class Key:
    """One client's key. All requests of a name share a `Usage`, also after the file has changed."""

    name: str
    settings: _Settings
    usage: Usage

    @contextmanager
    def request(self, count: int = 1) -> Iterator[None]:
        """Counts the block as `count` requests of this key that run at once. Raises `KeyLimitReached`.

        A request begins while tokens are left and is not interrupted when it uses more: the next ones wait for it.
        """
        with self.segmentation(count):
            rate = self.settings.tokens_per_minute
            if rate is not None and (balance := self.usage.refill(rate)) <= 0:
                raise KeyLimitReached(self.name, f"{rate} tokens a minute", (1 - balance) * 60 / rate)
            yield

    @contextmanager
    def segmentation(self, count: int = 1) -> Iterator[None]:
        """Counts the block as requests that generate no tokens, and so need none. Raises `KeyLimitReached`."""
        allowed = self.settings.concurrent_requests
        if allowed is not None and self.usage.running + count > allowed:
            raise KeyLimitReached(self.name, f"{allowed} concurrent requests", 1.0)
        self.usage.running += count
        try:
            yield
        finally:
            self.usage.running -= count

    @contextmanager
    def translation(self) -> Iterator[None]:
        """Counts the block as a translation, apart from requests, which may need one. Raises `KeyLimitReached`."""
        allowed = self.settings.concurrent_requests
        if allowed is not None and self.usage.translating >= allowed:
            raise KeyLimitReached(self.name, f"{allowed} concurrent translations", 1.0)
        self.usage.translating += 1
        try:
            yield
        finally:
            self.usage.translating -= 1

    def spend(self, token_count: int) -> None:
        """Counts generated tokens."""
        if rate := self.settings.tokens_per_minute:
            self.usage.balance = self.usage.refill(rate) - token_count


class Keys:
    """The keys of a TOML file. A changed file is used within a second; while it is invalid, the previous keys stay.

    Raises `InvalidConfiguration` if the file is invalid when constructed. Errors and logs never contain a token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._usage: dict[str, Usage] = {}
        self._content = _read(path)
        self._keys = self._parsed(self._content)
        self._checked = time.monotonic()
        self._failure = ""

    def find(self, authorization: str | None) -> Key:
        """Returns the key of an `authorization` header, "Bearer TOKEN". Raises `Unauthenticated`."""
        if time.monotonic() - self._checked >= _CHECK_SECONDS:
            self._checked = time.monotonic()
            self._reload()
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "the call has no token: send it as authorization: Bearer TOKEN (commands: --token-file FILE)"
            )
        digest, found = _digest(token.strip()), None
        for key in self._keys:  # all of them, so that the time does not tell which one is similar
            if hmac.compare_digest(digest, key.settings.digest):
                found = key
        if found is None:
            raise Unauthenticated("the token is not known here: ask the operator of this server for one")
        if (expires := found.settings.expires) and datetime.now(UTC) >= expires:
            raise Unauthenticated(f"the token of {found.name} expired on {expires:%Y-%m-%d}: ask for a new one")
        return found

    def _reload(self) -> None:
        try:
            content = _read(self._path)
            if content != self._content:
                self._keys = self._parsed(content)
                self._content = content
                _log.warning("%s has changed: %d keys are accepted now", self._path, len(self._keys))
            self._failure = ""
        except InvalidConfiguration as error:
            if str(error) != self._failure:
                self._failure = str(error)
                _log.error("the previous keys stay in use: %s", error)

    def _parsed(self, content: bytes) -> list[Key]:
        try:
            text = content.decode("utf-8-sig")  # editors of Windows put a mark in front
            tables = _File.model_validate({"keys": tomllib.loads(text)}).keys
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            # The error of the TOML library names a line, not its content.
            raise InvalidConfiguration(f"{self._path} is not a TOML file of keys ({error})") from None
        except ValidationError as error:
            problem = error.errors(include_input=False, include_context=False, include_url=False)[0]
            raise InvalidConfiguration(f"{self._path}, {_explain(text, problem)}") from None
        owners: dict[str, str] = {}
        for name, one in tables.items():
            place = f"{self._path}, {line_of(text, name)}[{name}]"
            if (one.token is None) == (one.token_sha256 is None):
                raise InvalidConfiguration(f"{place}: give either token or token-sha256")
            if (owner := owners.setdefault(one.digest, name)) != name:
                raise InvalidConfiguration(f"{place} has the same token as [{owner}]: give each key a token of its own")
        if not tables:
            raise InvalidConfiguration(f"{self._path} has no keys: add a table [NAME] with token-sha256")
        return [Key(name, one, self._usage.setdefault(name, Usage())) for name, one in tables.items()]


def _explain(text: str, error: Any) -> str:
    """Formats one pydantic error as its place in the file and what is allowed there, without what the place has."""
    _, name, *keys = error["loc"]
    key = "" if keys in ([], ["[key]"]) else str(keys[0])  # pydantic's sign for a name
    place = f"{line_of(text, name, key)}[{name}]{' ' * bool(key)}{key}"
    if error["type"] == "extra_forbidden":
        return f"{place}: {unknown(key, _Settings.model_fields)}"
    return f"{place} must be {_ALLOWED.get(error['type']) or allowed(error)}"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(
            f"the keys file {path} cannot be read ({error.strerror}): give the path of a TOML file of keys"
        ) from None
