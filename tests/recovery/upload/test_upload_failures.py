"""Uploads that fail, lapse or die: what they cost, and what is said of them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from snapshot.formats.file_index import decode_index
from snapshot.protocol.messages import BaseGrant
from snapshot.storage.files_to_upload import opened_file
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import LocalCopyError, StaleRequestError, StoreUnreachableError
from statebackend.runtime.worker.background_upload import BaseUpload
from tests.recovery.local.open_stores import store_of
from tests.recovery.local.open_stores import subtask as subtask_of
from tests.recovery.local.small_copies import ROOT, SMALL
from tests.recovery.upload.uploads import (
    LONG_S,
    Clock,
    Gate,
    Voice,
    grant_of,
    left_over,
    opened,
    tables,
    upload,
    wrote,
)
from tests.support.failing_store import FailingStore, Failure

# --- what goes wrong -----------------------------------------------------------------------------


def test_a_lapsed_grant_ends_the_upload(tmp_path: Path) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice(lapsed_after=1)
    wrote(held, 0)
    upload(held, grant_of(0), store, voice).run()
    assert not voice.told
    assert voice.given_up == 1
    assert not left_over(held)
    assert held.uploaded is None
    wrote(held, 1)  # the store is none the worse
    held.release()


@pytest.mark.parametrize("whole", [0, 1 << 20])
@pytest.mark.parametrize("failure", ["before", "after", OSError("The disk is gone.")])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_store_that_fails_on_the_way_costs_this_base_alone(
    tmp_path: Path, at: int, failure: Failure, whole: int
) -> None:
    held, inner, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 0)
    verbs = {"put_file", "put"}
    calls = iter(range(1, 100))
    failing = FailingStore(
        inner, lambda verb, name, number: failure if verb in verbs and next(calls) == at else None
    )
    upload(held, grant_of(0, whole=whole), failing, voice).run()
    assert len(voice.told) == (at > 1 and whole > 0)
    assert len(voice.told) + voice.given_up == 1
    assert not left_over(held)
    held.settle()
    wrote(held, 1)
    upload(held, grant_of(1, whole=whole), inner, voice).run()
    assert voice.told[-1].state_bytes > 0
    held.release()


@pytest.mark.parametrize("gone", ["files", "lease", "copy", "before"])
def test_an_upload_whose_local_copy_is_gone_says_so_and_what_that_means(
    tmp_path: Path,
    gone: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    turn = threading.Semaphore(1)
    one = BaseUpload(
        held,
        grant_of(0),
        store=MemoryStore(),
        generation=1,
        reporter=voice,
        now_s=Clock(),
        turn=turn,
        of="operator 'counts', subtask 3",
    )
    if gone == "lease":  # somebody sweeps between two calls
        work_folder = held.work_folder

        def swept(name: str) -> Path:
            folder = work_folder(name)
            folder.rmdir()
            return folder

        monkeypatch.setattr(held, "work_folder", swept)
        one.run()
    elif gone == "before":
        shutil.rmtree(held.path)
        one.run()
    else:
        with turn:  # another one is being sent
            one.start()
            held.settle()  # the files are linked
            shutil.rmtree(held.path / "work" if gone == "files" else held.path)
        assert wait_until(lambda: voice.given_up == 1)
    (why,) = voice.why
    assert why.startswith("The base after epoch 0 of operator 'counts', subtask 3 was given up")
    assert "[SB6002] The local copy's file" in why
    assert "is gone" in why
    assert "Nothing to do" in why
    assert "Errno" not in why
    assert "None" not in why
    assert voice.harmless == [not held.is_current]
    assert why not in caplog.text  # the driver says it
    assert voice.told == []


class BrokenStore(MemoryStore):
    """Fails to read what it is to upload."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        raise self.error


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("unreached", [False, True])
@pytest.mark.parametrize("failure", ["disk", "store", "stale"])
def test_an_upload_that_is_given_up_is_said_once_and_as_loud_as_it_matters(
    tmp_path: Path,
    failure: str,
    unreached: bool,
    moved: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    errors: dict[str, Exception] = {
        "disk": OSError(errno.EIO, os.strerror(errno.EIO)),  # as a read of an open file raises it
        "store": StoreUnreachableError("It does not answer."),
        "stale": StaleRequestError("It has lapsed."),
    }
    if moved:
        (held.path.parent / "current").write_bytes(b"another")
    voice.unreached = unreached
    with caplog.at_level(logging.INFO, "statebackend.upload"):
        upload(held, grant_of(0), BrokenStore(errors[failure]), voice).run()
    harmless = moved or failure == "stale"
    if unreached:
        (said,) = caplog.records
        assert said.levelno == (logging.INFO if harmless else logging.WARNING)
        why = said.getMessage()
    else:
        assert not caplog.records
        (why,) = voice.why
        assert voice.harmless == [harmless]
    if failure == "disk":
        assert f"file in {held.path} cannot be read (Input/output error). Nothing to do" in why
    held.release()


def test_a_file_that_is_gone_when_a_store_opens_it_is_told_of_as_any_other(tmp_path: Path) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    try:
        with opened_file(tmp_path / "000235.sst"):
            raise AssertionError
    except LocalCopyError as error:
        upload(held, grant_of(0), BrokenStore(error), voice).run()
    (why,) = voice.why
    assert "000235.sst is gone. Nothing to do if the subtask has moved" in why
    held.release()


def wait_until(met: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + LONG_S
    while not met() and time.monotonic() < until_s:
        time.sleep(0.01)
    return met()


def test_a_thread_that_cannot_be_started_keeps_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = opened(tmp_path)
    wrote(held, 0)
    one = upload(held, grant_of(0), MemoryStore())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="start new thread"):
            one.start()
    held.release()
    assert held.store is None


def test_one_base_at_a_time_is_sent_and_the_others_keep_their_grants(tmp_path: Path) -> None:
    store, voices = Gate(), [Voice(), Voice()]
    helds = [opened(tmp_path / str(n)) for n in (0, 1)]
    for held, voice in zip(helds, voices, strict=True):
        wrote(held, 0)
        upload(held, grant_of(0), store, voice).start()
        assert store.there.wait(LONG_S)
    store.gate.set()
    assert all(voice.at_end.wait(LONG_S) for voice in voices)
    for held in helds:
        held.release()


# --- a process that is killed half way -----------------------------------------------------------


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.recovery.driver import new_id
from tests.recovery.local.open_stores import store_of
from tests.recovery.upload.uploads import opened, uploaded, wrote
root, after = Path(sys.argv[1]), int(sys.argv[2])
class Killing(type(store_of(root))):
    def put_file(self, name, path):
        global after
        if name.startswith("base/") and "/g0/" not in name:
            after -= 1
            if after < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super().put_file(name, path)
store = Killing(root / "durable", new_id=new_id)
held = opened(root)
wrote(held, 0)
_, data, _ = uploaded(held, 0, store)
wrote(held, 1)
uploaded(held, 1, store, data)
"""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_process_that_is_killed_in_an_upload_leaves_a_store_that_can_be_uploaded(
    tmp_path: Path, after: int
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(after)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    store = store_of(tmp_path)
    held, reason = subtask_of(tmp_path).acquire(0)
    assert reason == ""
    assert left_over(held)
    found = held.open_store(SMALL).marker()
    assert found is not None
    assert found.epoch == 1
    assert not left_over(held)
    given = (held.path / "uploaded").read_bytes()
    first = decode_index(given)
    again = Voice()
    grant = BaseGrant(id="again", epoch=1, chain="c1", index=given, whole_limit_bytes=0, renew_s=1)
    upload(held, grant, store, again).run()
    index = decode_index(again.told[0].part.data)
    assert tables(first).items() < tables(index).items()
    assert not any("/g1/" in file.object for file in index.files)  # those are of no base
    for file in index.files:
        assert blake3(store.get(file.object)).hexdigest() == file.digest
    held.release()
