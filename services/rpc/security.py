"""The security of a server: where it may listen, its TLS credentials, and its limits as channel options."""

import logging
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from time import time

import grpc

from draftbridge.security import Credentials, is_local
from services.config import InvalidConfiguration, ProcessConfig, ServerConfig, exposure

_log = logging.getLogger(__name__)

# The seconds before a certificate's end in which a server that starts warns of it.
_EXPIRES_SOON = 7 * 86_400


def check_exposure(listen: str, config: ProcessConfig) -> None:
    """Raises `InvalidConfiguration` if other machines could reach a server without TLS or without authentication.

    With `insecure`, only logs a warning.
    """
    missing = config.lacks(listen)
    if missing and not config.insecure:
        raise InvalidConfiguration(f"the address {exposure(listen, missing)}")
    if missing:
        _log.warning("%s is open to everything that can reach it, because of --insecure: it lacks %s", listen, missing)


def warn_of_open_token(credentials: Credentials, addresses: Iterable[str]) -> None:
    """Logs to which other machines a server sends its own token unencrypted, which `insecure` allows."""
    if credentials.token_file is None or credentials.encrypted:
        return
    if others := [one for one in addresses if not is_local(one)]:
        _log.warning(
            "because of --insecure, the token of %s is sent unencrypted to %s",
            credentials.token_file,
            ", ".join(others),
        )


def warn_of_expiry(path: Path, end: float) -> None:
    """Logs that a server's certificate has expired or soon will. It is used all the same: clients decide."""
    if end - time() < _EXPIRES_SOON:  # False for NaN
        day = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")
        _log.warning(
            "the certificate %s is valid until %s, and clients refuse it after that: replace the file, no restart is "
            "needed",
            path,
            day,
        )


def limits(config: ServerConfig) -> list[tuple[str, int]]:
    """Returns the limits on what one connection or call may send, as channel options."""
    metadata = config.metadata_limit << 10
    return [
        ("grpc.max_receive_message_length", config.message_limit << 20),
        ("grpc.max_concurrent_streams", config.stream_limit),
        # Between the two limits, gRPC would refuse at random.
        ("grpc.max_metadata_size", metadata),
        ("grpc.absolute_max_metadata_size", metadata),
    ]


def server_credentials(config: ProcessConfig) -> grpc.ServerCredentials | None:
    """Returns the credentials for TLS, None without TLS. Raises `InvalidConfiguration`.

    gRPC asks for the certificate before each handshake, so new connections use changed files at once. While the files
    do not fit together, as between two writes, the previous ones stay in use.
    """
    files = certificates(config)
    if files is None:
        return None
    return grpc.dynamic_ssl_server_credentials(
        files.configuration,
        # None keeps the present one. gRPC calls this from a thread of its own.
        lambda: files.configuration if files.renew() else None,  # type: ignore[arg-type,return-value]
        require_client_authentication=config.tls_client_ca is not None,
    )


def server_context(config: ProcessConfig) -> ssl.SSLContext | None:
    """Returns the same for a server that is not gRPC's. Files are read again before a handshake, too."""
    files = certificates(config)
    if files is None:
        return None

    def on_handshake(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # The name is not needed: the callback runs in every handshake, and may replace the context of this one.
        files.renew()
        connection.context = files.context

    context = files.context
    context.sni_callback = on_handshake
    return context


def certificates(config: ProcessConfig) -> "Certificates | None":
    """Returns the certificate that a process is configured with, None without TLS. Raises `InvalidConfiguration`."""
    if config.tls_certificate is None or config.tls_key is None:
        if config.tls_certificate or config.tls_key or config.tls_client_ca:
            raise InvalidConfiguration("TLS needs both --tls-certificate and --tls-key: give both")
        return None
    return Certificates(config.tls_certificate, config.tls_key, config.tls_client_ca)


class Certificates:
    """The files of a server's certificate. `context` and `configuration` use what they last held together."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._content = self._read()
        self.context = self._load()
        self._failed: tuple[bytes | None, ...] | str | None = None

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, ca = self._content
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    def end(self) -> float:
        """Returns the end of validity, in seconds since 1970, of the certificate that a new connection gets now.

        NaN if it cannot be read: OpenSSL serves certificates that the library refuses.
        """
        from cryptography import x509  # takes 0.2 s, which a server without TLS need not spend

        self.renew()
        try:
            return x509.load_pem_x509_certificate(self._content[0]).not_valid_after_utc.timestamp()
        except ValueError:
            return nan

    def renew(self) -> bool:
        """Takes over changed files, and returns whether it did."""
        content: tuple[bytes, bytes, bytes | None] | str = ""
        try:
            content = self._read()
            if content == self._content:
                return False
            context = self._load()
            if content != self._read():  # they changed meanwhile, so what was checked is not what was read
                return False
        except InvalidConfiguration as error:
            self._report(content or str(error), error)
            return False
        self._content, self.context, self._failed = content, context, None
        return True

    def _report(self, failed: tuple[bytes | None, ...] | str, error: Exception) -> None:
        if self._failed != failed:  # one line for each change, not for each connection
            self._failed = failed
            _log.warning("the previous certificate stays in use: %s", error)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        try:
            ca = self._client_ca.read_bytes() if self._client_ca else None
            return self._certificate.read_bytes(), self._key.read_bytes(), ca
        except OSError as error:
            raise InvalidConfiguration(
                f"{error.filename} cannot be read ({error.strerror}): give the path of a PEM file"
            ) from None

    def _load(self) -> ssl.SSLContext:
        """Raises `InvalidConfiguration` unless the files are PEM and the key is that of the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InvalidConfiguration(
                f"{self._certificate} and {self._key} are not a certificate and its unencrypted key in PEM ({error}): "
                "give files that belong together"
            ) from None
        try:
            if self._client_ca:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                # A client that resumes a session shows no certificate, so it would stay admitted without its authority.
                # For TLS 1.2 OpenSSL remembers sessions itself, which Python cannot switch off.
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.num_tickets = 0
        except (ssl.SSLError, OSError) as error:
            raise InvalidConfiguration(
                f"{self._client_ca} has no certificates in PEM ({error}): give the file of the clients' authority"
            ) from None
        return context
