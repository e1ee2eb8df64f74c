"""Where a session's coordinator answers, and the credentials that let a task in."""

from __future__ import annotations

from typing import Any

import msgspec

from statebackend.errors import StaleRequestError

__all__ = ["Credentials", "Endpoint", "not_running"]


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """By what a session knows its tasks, and they their driver; by broadcast, in no closure or log.

    Attributes:
        certificate: the driver's, PEM, the only one that tasks trust; b"": they speak no TLS.
    """

    token: str
    certificate: bytes = b""

    def __repr__(self) -> str:
        return "Credentials(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # else rich shows all fields of a Struct
        return []


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session's coordinator answers.

    Location and session travel as a Spark local property, which Spark writes to event logs; the
    credentials come apart from them.
    """

    location: str
    session: str
    token: str
    certificate: bytes = b""

    def to_property(self) -> str:
        """As one local property, without the credentials."""
        return msgspec.json.encode([self.location, self.session]).decode()

    @classmethod
    def from_property(cls, text: str, credentials: Credentials) -> Endpoint:
        """Back from :meth:`to_property`.

        Raises:
            msgspec.MsgspecError: it is none.
        """
        location, session = msgspec.json.decode(text, type=tuple[str, str])
        return cls.of(location, session, credentials)

    @classmethod
    def of(cls, location: str, session: str, credentials: Credentials) -> Endpoint:
        """Of its parts."""
        token, certificate = credentials.token, credentials.certificate
        return cls(location=location, session=session, token=token, certificate=certificate)

    @property
    def credentials(self) -> Credentials:
        """What is needed to be let in."""
        return Credentials(token=self.token, certificate=self.certificate)

    def __repr__(self) -> str:  # logs and tracebacks are without credentials
        return f"Endpoint(location={self.location!r}, session={self.session!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("location", self.location), ("session", self.session)]


def not_running(job: str) -> StaleRequestError:
    """The error for a request of a session that is over, or was never here."""
    return StaleRequestError(
        f"A request for a session of job {job!r} that is not running here.",
        todo="Nothing to do if its query was stopped; else start the query again.",
    )
