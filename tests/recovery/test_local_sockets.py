"""A local socket answers processes of one user, and outlives whatever goes wrong with one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.local import local_sockets
from recovery.local.local_sockets import Listener, connect


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path / "door", "asked", tick_s=0.2, closed=threading.Event())
    yield made
    made.close()


@pytest.fixture
def asking(listener: Listener, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        assert connect(asking, tmp_path / "door")
        asking.settimeout(10)
        yield asking


def test_where_nobody_asks_the_tick_ends(listener: Listener) -> None:
    assert listener.accept() is None


def test_one_of_this_user_is_answered(listener: Listener, asking: socket.socket) -> None:
    asker = listener.accept()
    assert asker is not None
    with asker:
        asker.sendall(b"yes")
        assert asking.recv(3) == b"yes"


def test_one_of_another_user_is_hung_up_on(
    listener: Listener, asking: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "peer_uid", lambda _: os.geteuid() + 1)
    assert listener.accept() is None
    assert asking.recv(1) == b""


def test_another_user_who_listens_is_told_nothing(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "peer_uid", lambda _: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        assert not connect(asking, tmp_path / "door")


def test_one_whose_user_cannot_be_asked_for_is_hung_up_on(
    listener: Listener, asking: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels do not tell of a process that is gone again."""

    def gone(_: socket.socket) -> int:
        raise OSError("not connected")

    monkeypatch.setattr(local_sockets, "peer_uid", gone)
    assert listener.accept() is None
    assert asking.recv(1) == b""


def test_a_path_that_is_too_long_for_an_address_is_listened_at(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "door"
    path.parent.mkdir()
    listener = Listener(path, "asked", tick_s=5.0, closed=threading.Event())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        assert connect(asking, path)
        asker = listener.accept()
        assert asker is not None
        asker.close()
    listener.close()
