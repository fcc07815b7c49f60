"""Certificates for tests, of authorities that exist for one test run."""

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import trustme


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key, and their options for a server."""

    certificate: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The options that serve with this certificate."""
        return ("--tls-certificate", str(self.certificate), "--tls-key", str(self.key))


def authority(path: Path) -> trustme.CA:
    """Returns a new authority, whose certificate is in the file `path`."""
    made = trustme.CA()
    made.cert_pem.write_to_path(path)
    return made


def issue(
    by: trustme.CA, directory: Path, name: str, address: str = "127.0.0.1", not_after: datetime | None = None
) -> Pair:
    """Writes NAME.pem and NAME.key with a new certificate for an address."""
    made = by.issue_cert(address, not_before=not_after and not_after - timedelta(1), not_after=not_after)
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    pair.certificate.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    made.private_key_pem.write_to_path(pair.key)
    return pair


def admitted_around(change: Callable[[], object], url: str, context: ssl.SSLContext) -> list[bool]:
    """Returns whether a client gets a page before a change, and after it, when it resumes its session if it has one."""
    where, session, answers = urlsplit(url), None, []
    for attempt in range(2):
        answer = b""
        with suppress(ssl.SSLError, ConnectionError):
            plain = socket.create_connection((where.hostname, where.port), timeout=60)
            with context.wrap_socket(plain, server_hostname=where.hostname, session=session) as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
                session = connection.session
                connection.unwrap().close()  # an orderly end, without which OpenSSL forgets the session
        answers.append(b" 200 OK" in answer)
        if attempt == 0:
            change()
    return answers
