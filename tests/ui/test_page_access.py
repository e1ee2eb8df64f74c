"""Who may see the page."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from statebackend.errors import SettingError
from statebackend.ui.page_access import Access, Granted, Refused, SignedIn
from statebackend.ui.page_server import Answer, PageServer

TOKEN = "a long enough token"


class Shown:
    """Notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        self.asked.append((path, query))
        return Answer(b"shown")


def decide(
    token: str = "",
    path: str = "/",
    host: str | None = "localhost:80",
    bearer: str | None = None,
    cookies: str | None = None,
) -> Granted | SignedIn | Refused:
    return Access(token, "127.0.0.1").decide(path, host, bearer, cookies)


def signed_in(token: str) -> SignedIn:
    found = decide(token, path=f"/?token={token.replace(' ', '%20')}")
    assert isinstance(found, SignedIn)
    return found


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1:80", "[::1]:80", "LOCALHOST", "::1"])
def test_without_a_token_the_names_of_this_host_are_answered(host: str) -> None:
    assert decide(host=host) == Granted()


@pytest.mark.parametrize(
    "host", ["evil.example:80", "localhost.evil.example", "", None, "127.0.0.1.evil.example:80"]
)
def test_without_a_token_another_name_is_refused(host: str | None) -> None:
    found = decide(host=host)
    assert isinstance(found, Refused)
    assert found.status == 403


def test_with_a_token_nobody_else_is_answered() -> None:
    name = signed_in(TOKEN).cookie.partition("=")[0]
    for given in ({}, {"bearer": "Bearer another"}, {"cookies": f"{name}={TOKEN}"}):
        found = decide(TOKEN, **given)  # type: ignore[arg-type]
        assert isinstance(found, Refused)
        assert found.status == 401
    assert isinstance(decide(TOKEN, path="/?token=another"), Refused)


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address() -> None:
    found = decide(TOKEN, path="//jobs/a/?x=1&token=a%20long%20enough%20token")
    assert isinstance(found, SignedIn)
    assert found.location == "/jobs/a/?x=1"  # of this server, whatever stood before
    assert TOKEN not in found.cookie
    assert decide(TOKEN, cookies=f"a=b; {found.cookie}") == Granted()


def test_pages_of_two_drivers_on_one_host_keep_their_cookies_apart() -> None:
    one, other = (signed_in(token).cookie for token in (TOKEN, "another of 16 or more"))
    assert one.partition("=")[0] != other.partition("=")[0]
    for token in (TOKEN, "another of 16 or more"):
        assert decide(token, cookies=f"{one}; {other}") == Granted()
    assert decide(TOKEN, host="proxy.example", bearer=f"Bearer {TOKEN}") == Granted()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "driver.example"])
def test_a_network_is_not_shown_the_page_without_a_token(host: str) -> None:
    with pytest.raises(SettingError, match=r"ui\.token"):
        PageServer(Shown(), host=host, port=0, token="")


@pytest.fixture(scope="module")
def one_server() -> Iterator[tuple[PageServer, Shown]]:
    site = Shown()
    server = PageServer(site, host="127.0.0.1", port=0, token=TOKEN)
    yield server, site
    server.stop()


@pytest.fixture
def served(one_server: tuple[PageServer, Shown]) -> tuple[PageServer, Shown]:
    one_server[1].asked.clear()
    return one_server


def ask(
    server: PageServer, path: str, method: str = "GET", **head: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    connection.request(method, path, headers=head)
    found = connection.getresponse()
    found.read()
    connection.close()
    return found


def test_a_browser_signs_in_once(served: tuple[PageServer, Shown]) -> None:
    server, site = served
    assert ask(server, "/").status == 401
    found = ask(server, "/jobs/a/?token=a+long+enough+token")
    cookie = found.headers["Set-Cookie"]
    assert (found.status, found.headers["Location"]) == (303, "/jobs/a/")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(server, "/jobs/a/?x=1", Cookie=cookie.partition(";")[0]).status == 200
    assert site.asked == [("/jobs/a/", {"x": "1"})]


def test_no_answer_lets_another_server_in(served: tuple[PageServer, Shown]) -> None:
    head = ask(served[0], "/", Authorization=f"Bearer {TOKEN}").headers
    assert head["Content-Security-Policy"].startswith("default-src 'self'; ")
    assert head["X-Frame-Options"] == "DENY"
    assert head["X-Content-Type-Options"] == "nosniff"
    assert head["Cache-Control"] == "no-store"
    assert head.get("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_possible(served: tuple[PageServer, Shown], method: str) -> None:
    server, site = served
    assert ask(server, "/", method, Authorization=f"Bearer {TOKEN}").status == 501
    assert site.asked == []


def test_a_port_that_is_taken_is_said(served: tuple[PageServer, Shown]) -> None:
    with pytest.raises(SettingError, match=r"ui\.port"):
        PageServer(Shown(), host="127.0.0.1", port=served[0].port, token="")
