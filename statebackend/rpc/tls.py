"""TLS between the processes of a job: certificates made in memory, and trusted one by one.

A process that serves makes a key and a certificate of its own when it begins to. The key never
leaves it. The certificate is signed by nobody else, and is all that its clients trust: the driver's
reaches the executors with the token, a slot's the other slots by way of the driver.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any, Final, NoReturn

import pyarrow.flight as flight

from statebackend.errors import EnvironmentMissingError
from statebackend.settings import Settings
from statebackend.texts import install_extra

__all__ = ["Tls", "connect", "driver_tls", "location_of", "self_signed"]

_NAME: Final = "statebackend.internal"  # of every server: which one it is, its certificate says
# A certificate ends with its process, and is trusted by name: no clock has a say in it.
_FROM: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Tls:
    """A server's certificate and its private key, PEM. It cannot be sent, nor shown.

    Attributes:
        certificate: what clients trust. key: for this process alone.
    """

    __slots__ = ("certificate", "key")

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self.certificate, self.key = certificate, key

    def __repr__(self) -> str:
        return "Tls(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("The private key of a server stays in its process; send its certificate.")


def self_signed() -> Tls:
    """A fresh key (EC, P-256), and a certificate for it.

    Raises:
        EnvironmentMissingError: the package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise EnvironmentMissingError(
            "TLS needs the package cryptography, which is not installed.",
            todo=install_extra("tls", "on the driver and on every executor"),
        ) from error
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Tls(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


class _Driver:
    lock: Final = threading.Lock()
    tls: Tls | None = None


def driver_tls(settings: Settings) -> Tls | None:
    """This driver process's own, made when it is first asked for; None: TLS is off.

    Raises:
        EnvironmentMissingError: the package cryptography is not installed.
    """
    if not settings.tls:
        return None
    with _Driver.lock:
        if _Driver.tls is None:
            _Driver.tls = self_signed()
        return _Driver.tls


def location_of(host: str, port: int, *, tls: bool) -> str:
    """As Flight writes an address."""
    named = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{_scheme(tls)}{named}:{port}"


def _scheme(tls: bool) -> str:
    return "grpc+tls://" if tls else "grpc://"


def connect(location: str, certificate: bytes) -> Any:
    """Flight's connection to a server; it is made when it is first used.

    Args:
        certificate: the only one that the server may show; b"": without TLS.

    Raises:
        ConnectionError: one of both is without TLS, and the other is not.
    """
    tls = bool(certificate)
    if not location.startswith(_scheme(tls)):
        raise ConnectionError(f"this process speaks {'TLS, and no less' if tls else 'no TLS'}")
    if not tls:
        return flight.connect(location)
    return flight.connect(location, tls_root_certs=certificate, override_hostname=_NAME)
