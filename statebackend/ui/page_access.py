"""Who may see the page: decided from a request's head alone, without I/O.

With a token, whoever has it. Without one, whoever is on this host: then the name by which the page
was asked for must be this host's own, or any page in somebody's browser could read it under a name
that it had let point here (DNS rebinding).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from blake3 import blake3

from statebackend.errors import SettingError

__all__ = ["Access", "Granted", "Refused", "SignedIn", "check_bind", "is_loopback"]

_COOKIE: Final = "statebackend"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Granted:
    """The page may be shown."""


@dataclass(frozen=True)
class SignedIn:
    """The token was in the address: to be moved to a cookie, and the same page asked for again.

    Attributes:
        cookie: its name and its value.
    """

    location: str
    cookie: str


@dataclass(frozen=True)
class Refused:
    """It may not. ``status``: of HTTP."""

    status: int
    text: str


@dataclass(frozen=True)
class Access:
    """Args: token: that must be known; empty: none is asked for. bind: the server's address."""

    token: str
    bind: str

    def decide(
        self, path: str, host: str | None, authorization: str | None, cookies: str | None
    ) -> Granted | SignedIn | Refused:
        """Whether a request is answered.

        Args:
            path: with the query. host, authorization, cookies: of the headers.
        """
        if not self.token:
            if _name_of(host) in _LOOPBACK | {self.bind.lower()}:
                return Granted()
            return Refused(
                403,
                "This page is for this host alone: ask for it as http://localhost:PORT/, or set "
                "spark.statebackend.ui.token.",
            )
        bare, given = _without_token(path)
        if given is not None:
            if _same(given, self.token):
                return SignedIn(bare, f"{self._cookie_name}={self._cookie}")
            return Refused(403, "The token is another one.")
        scheme, _, bearer = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and _same(bearer.strip(), self.token):
            return Granted()
        if _same(_cookie_in(cookies, self._cookie_name), self._cookie):
            return Granted()
        return Refused(401, "Open this page once with ?token=... at the end of its address.")

    @property
    def _cookie_name(self) -> str:
        """Another one for another token: browsers do not tell the ports of a host apart."""
        return f"{_COOKIE}-{blake3(self._cookie.encode()).hexdigest()[:8]}"

    @property
    def _cookie(self) -> str:
        """What a browser keeps: not the token itself."""
        return blake3(b"statebackend page\0" + self.token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own host alone."""
    return host.lower() in _LOOPBACK or host.startswith("127.")


def check_bind(host: str, token: str) -> None:
    """Refuse to show the page to a network without a token.

    Raises:
        SettingError: saying so.
    """
    if not token and not is_loopback(host):
        raise SettingError(
            f"The page would be open to everybody who reaches {host}.",
            todo="Set spark.statebackend.ui.token (`statebackend ui`: STATEBACKEND_UI_TOKEN), or "
            "leave spark.statebackend.ui.host (--host) out.",
        )


def _name_of(host: str | None) -> str:
    """The name in a Host header, without its port."""
    name = (host or "").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def _without_token(path: str) -> tuple[str, str | None]:
    place, _, query = path.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    given = next((value for name, value in pairs if name == "token"), None)
    rest = urlencode([pair for pair in pairs if pair[0] != "token"])
    # One slash at its begin: two would be the name of another server.
    return "/" + place.lstrip("/") + (f"?{rest}" if rest else ""), given


def _cookie_in(header: str | None, name: str) -> str:
    try:
        found = SimpleCookie(header or "").get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
