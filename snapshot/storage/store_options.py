"""How a store is reached, in a form that may be shipped: no secret is ever in it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from statebackend.errors import SettingError

__all__ = ["StoreOptions"]

_SSE = ("", "AES256", "aws:kms")
_S3_ONLY = ("endpoint_url", "region", "sse", "kms_key_id", "role_arn", "ca_bundle")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What S3 needs to know beyond the URI. Credentials come from boto3's chain in each process.

    Attributes:
        endpoint_url: of a server that is not Amazon's, `https://host:port`; empty: boto3's choice
            (its environment variables and configuration files included).
        region: empty: boto3's choice.
        sse: server-side encryption to ask for: '', 'AES256' or 'aws:kms'.
        kms_key_id: the key for 'aws:kms'; empty: the account's own.
        role_arn: a role to assume through STS, renewed as it runs out.
        ca_bundle: a file of certificates to trust instead of the usual ones, on every host.
        deadline_s: how long one call may go on trying. The last try may overrun it by its own
            timeouts.
        connect_timeout_s: for one connection.
        read_timeout_s: for the next bytes of an answer.
        max_connections: kept open per process.
        upload_threads: how many parts of one large file are uploaded at a time; each holds a
            connection, none holds the part in memory.
    """

    endpoint_url: str = ""
    region: str = ""
    sse: str = ""
    kms_key_id: str = ""
    role_arn: str = ""
    ca_bundle: str = ""
    deadline_s: float = 60.0
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    max_connections: int = 16
    upload_threads: int = 1

    def __post_init__(self) -> None:
        """Raises `SettingError` for values that mean nothing or hold a secret."""
        if self.endpoint_url:
            _check_endpoint(self.endpoint_url)
        if self.sse not in _SSE:
            raise SettingError(
                f"The server-side encryption {self.sse!r} is not known.",
                todo="Use '', 'AES256' or 'aws:kms'.",
            )
        if self.kms_key_id and self.sse != "aws:kms":
            raise SettingError(
                "A KMS key is given, but encryption with KMS is not asked for.",
                todo="Set sse='aws:kms' too.",
            )
        for name in ("deadline_s", "connect_timeout_s", "read_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise _not_positive(name, getattr(self, name))
        for name in ("max_connections", "upload_threads"):
            if getattr(self, name) < 1:
                raise _not_positive(name, getattr(self, name))

    def refuse_s3_only(self, uri: str) -> None:
        """Raises `SettingError` if something is asked for that only S3 can give.

        Encryption that was asked for must not be left out in silence.
        """
        given = [name for name in _S3_ONLY if getattr(self, name)]
        if given:
            raise SettingError(
                f"The store {uri!r} is not on S3, where alone {', '.join(given)} means something.",
                todo="Leave that out, or use an s3:// store.",
            )


def _check_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        # Not repeated here: it holds a secret.
        raise SettingError(
            "The endpoint URL of the store holds credentials.",
            todo="Leave them out: they come from AWS_ACCESS_KEY_ID, a profile or a role.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise SettingError(
            f"The endpoint {url!r} is not the URL of a server.",
            todo="Use the form https://host:port.",
        )


def _not_positive(name: str, value: float) -> SettingError:
    return SettingError(
        f"The store option {name} is {value}.", todo="Give a number greater than zero."
    )
