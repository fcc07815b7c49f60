"""Defines the values that settings take: addresses, names, cores and so on, each with its check."""

import re
from typing import Annotated

from pydantic import AfterValidator

from services.engines.registry import engines

# Addresses in gRPC's own syntax.
_SCHEMES = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:")
# Bytes of a command line that are not UTF-8 become these characters.
_SURROGATES = r"\ud800-\udfff"
# A name, an IPv4 address, or an IPv6 address in brackets.
_HOST_PART = re.compile(rf"[^\s:/\[\]{_SURROGATES}]+|\[[0-9A-Fa-f:.%\w]+\]")
# A name by which a request may address an HTTP server.
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:]+\]?")
# The most characters of a model's name.
MAX_NAME_LENGTH = 256


def host_and_port(address: str) -> tuple[str, int]:
    """Returns both parts of HOST:PORT. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    if not host or not _HOST_PART.fullmatch(host) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("HOST:PORT with a port from 0 to 65535, and an IPv6 address in brackets")
    return host, int(port)


def _listen(value: str) -> str:
    host_and_port(value)
    return value


def _service(value: str) -> str:
    if not value.startswith(_SCHEMES):
        host_and_port(value)
    elif re.search(f"[{_SURROGATES}]", value):
        raise ValueError("an address in valid UTF-8")
    return value


def _otlp(value: str) -> str:
    scheme, _, address = value.partition("://")
    if value and scheme not in ("http", "https"):
        raise ValueError("http://HOST:PORT or https://HOST:PORT")
    if value:
        host_and_port(address.rstrip("/"))
    return value


def _origins(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(one == "*" or re.fullmatch(r"https?://[^/\s]+", one) for one in value):
        raise ValueError("scheme, host and port without a path, as https://example.com or http://localhost:3000")
    return value


def _hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_HOST.fullmatch, value)):
        raise ValueError("names such as example.com or *.example.com, without scheme and port")
    return value


def _name(value: str) -> str:
    if len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError(f"at most {MAX_NAME_LENGTH} printable characters")
    return value


def _engine(value: str) -> str:
    if value not in ("auto", *engines()):
        raise ValueError(f"one of auto, {', '.join(engines())}")
    return value


def _cores(value: str) -> str:
    part = r"\s*\d{1,5}(-\d{1,5})?\s*"
    if value and not re.fullmatch(rf"numa:\d+|{part}(,{part})*", value):
        raise ValueError("numbers of cores as 0-7,16, or numa:0")
    return value


Listen = Annotated[str, AfterValidator(_listen)]
OptionalListen = Annotated[str, AfterValidator(lambda value: value and _listen(value))]
Service = Annotated[str, AfterValidator(_service)]
Otlp = Annotated[str, AfterValidator(_otlp)]
Origins = Annotated[tuple[str, ...], AfterValidator(_origins)]
Hosts = Annotated[tuple[str, ...], AfterValidator(_hosts)]
Name = Annotated[str, AfterValidator(_name)]
Engine = Annotated[str, AfterValidator(_engine)]
Cores = Annotated[str, AfterValidator(_cores)]
