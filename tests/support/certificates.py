"""Certificates for tests, of authorities that exist for one test run."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

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
