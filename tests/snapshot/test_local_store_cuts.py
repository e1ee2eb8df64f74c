"""A write to a folder that is cut at any step leaves the whole object or none."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshot.storage import LocalStore, ObjectStore
from statebackend.errors import StateBackendError, StoreUnreachableError
from tests.snapshot.fresh_ids import new_id

# --- LocalStore: crash points --------------------------------------------------------------------


class PowerCut(BaseException):
    """The process ends here: nothing after it runs, not even cleaning up."""


STEPS = ("mkdir", "open", "write", "fsync", "close", "link", "replace", "unlink")


def cut_at(patch: pytest.MonkeyPatch, step: int, error: BaseException) -> Callable[[], int]:
    """Make the step-th call to the operating system, and (after a power cut) all later ones, fail.

    Returns how many steps were taken.
    """
    taken = 0

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal taken
            taken += 1
            if taken == step or (taken > step and isinstance(error, PowerCut)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        patch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: taken


def write(store: ObjectStore, verb: str, body: bytes) -> None:
    if verb == "create":
        store.create("log/0", [body[:4], body[4:]])
    else:
        store.put("log/0", [body[:4], body[4:]])


@pytest.mark.parametrize("verb", ["create", "put"])
@pytest.mark.parametrize("how", ["power cut", "error"])
def test_a_write_cut_at_any_step_leaves_the_whole_object_or_none(
    tmp_path: Path, verb: str, how: str
) -> None:
    outcomes = set()
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        store = LocalStore(root, new_id=new_id)
        error = PowerCut() if how == "power cut" else OSError(errno.EIO, "injected")
        with pytest.MonkeyPatch.context() as patch:
            taken = cut_at(patch, step, error)
            try:
                write(store, verb, b"whole body")
                finished = True
            except (PowerCut, StateBackendError):
                finished = False
        again = LocalStore(root, new_id=new_id)
        found = [(info.name, info.size_bytes) for info in again.list("")]
        assert found in ([], [("log/0", 10)])
        if found:
            assert again.get("log/0") == b"whole body"
        assert found or not finished
        outcomes.add(bool(found))
        write(again, verb, b"whole body")  # the place is usable afterwards
        assert again.get("log/0") == b"whole body"
        if taken() < step:
            break
    assert taken() < step
    assert outcomes == {True, False}


def test_a_replacement_cut_at_any_step_leaves_the_old_or_the_new_object(tmp_path: Path) -> None:
    seen = set()
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        LocalStore(root, new_id=new_id).put("log/0", [b"old"])
        with pytest.MonkeyPatch.context() as patch:
            taken = cut_at(patch, step, PowerCut())
            with contextlib.suppress(PowerCut):
                LocalStore(root, new_id=new_id).put("log/0", [b"the new one"])
        seen.add(LocalStore(root, new_id=new_id).get("log/0"))
        if taken() < step:
            break
    assert seen == {b"old", b"the new one"}


def test_a_file_is_synced_before_it_is_named_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(handle: int) -> None:
        trail.append("fsync " + os.readlink(f"/proc/self/fd/{handle}").rsplit("/", 1)[1])
        real_fsync(handle)

    def link(source: Path, target: Path) -> None:
        trail.append("link")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store = LocalStore(tmp_path / "root", new_id=lambda: "temp")
    store.create("log/0", [b"x"])
    first = trail[:]
    assert first.index("fsync temp") < first.index("link") < len(first) - 1
    assert first[-1] == "fsync log"
    assert f"fsync {tmp_path.name}" in first[: first.index("link")]  # the root's own entry
    assert first.count("fsync root") == 2  # the entries of .tmp and of log
    trail.clear()
    store.create("log/1", [b"x"])
    assert trail == ["fsync temp", "link", "fsync log"]


def test_an_object_whose_folder_failed_to_sync_is_not_read_back_as_if_it_were_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    store.create("log/0", [b"x"])
    real_fsync, calls = os.fsync, iter(range(9))

    def fsync(handle: int) -> None:
        if next(calls) == 1:  # the second: the folder, after the link
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreUnreachableError, match="EIO"):
            store.create("log/1", [b"y"])
    for read in (lambda: store.get("log/1"), lambda: store.get_tail("log/1", 1)):
        with pytest.raises(StoreUnreachableError, match="sync"):
            read()
    assert store.get("log/0") == b"x"
    store.put("log/1", [b"z"])
    assert store.get("log/1") == b"z"
