"""The preloaded library: what a process under it sees, and that nobody else does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.drill.faults.shim import Shim, build_shim, environment

HELPERS = """
import errno, json, os, sys, time
from pathlib import Path
folder, control = Path(sys.argv[1]), Path(sys.argv[2])

def outcome(function, *args):
    try:
        return "ok" if function(*args) is not None else "ok"
    except OSError as error:
        return errno.errorcode[error.errno]

def turn(name, text):
    (control / name).write_text(text)
    time.sleep(0.12)

def say(**found):
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("no C compiler")
    return built


Run = Callable[..., dict]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def control(tmp_path: Path) -> Path:
    path = tmp_path / "control"
    path.mkdir()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def start(library: Path, control: Path, folder: Path) -> Start:
    def started(script: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", HELPERS + textwrap.dedent(script), folder, control, *words],
            env={**os.environ, **environment(library, control)},
            stdout=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def run(start: Start) -> Run:
    def ran(script: str, *words: str) -> dict:
        process = start(script, *words)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return json.loads(out)

    return ran


def test_a_folder_whose_name_the_loader_would_split_does_no_harm(
    tmp_path: Path, control: Path
) -> None:
    built = build_shim(tmp_path / "a drill" / "of:mine")
    if built is None:
        pytest.skip("no C compiler")
    control = tmp_path / "a control"
    shim = Shim(control)
    shim.forbid_writes(tmp_path)
    script = f"""
        import errno
        try:
            open({str(tmp_path / "file")!r}, "w")
        except OSError as error:
            print(errno.errorcode[error.errno])
        """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment(built, control)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split() == ["EROFS"]


def test_a_library_without_effect_is_as_good_as_none(tmp_path: Path, library: Path) -> None:
    folder = tmp_path / "shim"
    folder.mkdir()
    (folder / library.name).write_bytes(b"nothing that a loader takes")
    assert build_shim(folder) is None


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, f"waited for {what}"
        time.sleep(0.02)


def test_without_a_fault_nothing_is_different(run: Run) -> None:
    found = run(
        """
        path = folder / "a"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
        os.write(handle, b"text"), os.fsync(handle), os.close(handle)
        os.link(path, folder / "b"), os.rename(path, folder / "c"), os.unlink(folder / "b")
        say(mode=(folder / "c").stat().st_mode & 0o777, text=(folder / "c").read_text(),
            names=sorted(os.listdir(folder)), now=time.time())
        """
    )
    assert found["mode"] == 0o640
    assert (found["text"], found["names"]) == ("text", ["c"])
    assert abs(found["now"] - time.time()) < 60


def test_syncs_fail_below_the_path_and_nowhere_else(run: Run) -> None:
    found = run(
        """
        (folder / "in").mkdir()
        inside = os.open(folder / "in" / "a", os.O_WRONLY | os.O_CREAT)
        outside = os.open(folder / "inner", os.O_WRONLY | os.O_CREAT)
        turn("fsync-fails", str(folder / "in"))
        failed = [outcome(os.fsync, inside), outcome(os.fdatasync, inside)]
        of_folder = outcome(os.fsync, os.open(folder / "in", os.O_RDONLY))
        beside = outcome(os.fsync, outside)
        (control / "fsync-fails").unlink()
        time.sleep(0.12)
        say(failed=failed, of_folder=of_folder, beside=beside, later=outcome(os.fsync, inside))
        """
    )
    assert found["failed"] == ["EIO", "EIO"]
    assert found["of_folder"] == "EIO"
    assert (found["beside"], found["later"]) == ("ok", "ok")


def test_a_full_disk_takes_no_byte_and_no_new_file_but_lets_read_and_delete(run: Run) -> None:
    found = run(
        """
        handle = os.open(folder / "a", os.O_RDWR | os.O_CREAT)
        os.write(handle, b"before")
        turn("disk-full", str(folder))
        say(write=outcome(os.write, handle, b"more"), at=outcome(os.pwrite, handle, b"more", 0),
            room=outcome(os.posix_fallocate, handle, 0, 100),
            make=outcome(os.open, folder / "b", os.O_WRONLY | os.O_CREAT),
            text=outcome((folder / "c").write_text, "text"), mkdir=outcome(os.mkdir, folder / "d"),
            reopen=outcome(os.open, folder / "a", os.O_RDWR | os.O_CREAT),
            read=(folder / "a").read_text(), delete=outcome(os.unlink, folder / "a"),
            outside=outcome((control / "x").write_text, "text"))
        """
    )
    refused = {found[name] for name in ("write", "at", "room", "make", "text", "mkdir")}
    assert refused == {"ENOSPC"}
    assert found["read"] == "before"
    assert (found["reopen"], found["delete"], found["outside"]) == ("ok", "ok", "ok")


def test_a_read_only_disk_changes_nothing_even_for_root(run: Run, folder: Path) -> None:
    found = run(
        """
        (folder / "a").write_text("before")
        handle = os.open(folder / "a", os.O_RDWR)
        turn("read-only", str(folder))
        say(open=outcome(os.open, folder / "a", os.O_RDWR), write=outcome(os.write, handle, b"x"),
            make=outcome((folder / "b").write_text, "text"),
            cut=outcome(os.open, folder / "a", os.O_RDONLY | os.O_TRUNC),
            rename=outcome(os.rename, folder / "a", folder / "c"),
            out=outcome(os.rename, folder / "a", control / "c"),
            link=outcome(os.link, folder / "a", folder / "c"),
            unlink=outcome(os.unlink, folder / "a"), mkdir=outcome(os.mkdir, folder / "d"),
            rmdir=outcome(os.rmdir, folder), read=(folder / "a").read_text())
        """
    )
    assert found.pop("read") == "before"
    assert set(found.values()) == {"EROFS"}
    assert (folder / "a").read_text() == "before"


@pytest.mark.parametrize("offset_ms", [3_600_000, -3_600_000, -250])
def test_the_wall_clock_jumps_and_no_other_does(run: Run, control: Path, offset_ms: int) -> None:
    found = run(
        """
        import threading
        wall_ns, steady_ns = time.time_ns(), time.monotonic_ns()
        turn("clock-offset-ms", sys.argv[3])
        jumped_ns = time.time_ns() - wall_ns - (time.monotonic_ns() - steady_ns)
        began = time.monotonic()
        threading.Event().wait(0.2)
        say(jumped_ms=jumped_ns / 1e6, waited_s=time.monotonic() - began, pid=os.getpid())
        """,
        str(offset_ms),
    )
    assert Shim(control).shifted(offset_ms) == {found["pid"]}
    assert not Shim(control).shifted(offset_ms + 1)
    assert abs(found["jumped_ms"] - offset_ms) < 100
    assert 0.15 < found["waited_s"] < 10


@pytest.mark.parametrize(
    ("when", "call", "there"),
    [
        ("before", "unlink", ["a"]),
        ("after", "unlink", []),
        ("before", "rename", ["a"]),
        ("after", "rename", ["a.new"]),
        ("before", "link", ["a"]),
        ("after", "link", ["a", "a.new"]),
    ],
)
def test_a_process_waits_at_a_call_until_it_is_let_go(
    start: Start, control: Path, folder: Path, when: str, call: str, there: list[str]
) -> None:
    shim = Shim(control)
    shim.hold_at(call, "disk/a", when=when)
    process = start(
        f"""
        (folder / "a").write_text("text"), (folder / "other").write_text("text")
        os.unlink(folder / "other")
        paths = [folder / "a"] if "{call}" == "unlink" else [folder / "a", folder / "a.new"]
        os.{call}(*paths)
        say(done=True)
        """
    )
    until(shim.held, "the held call")
    pid, held, path = shim.held().split(" ", 2)
    assert (int(pid), held) == (process.pid, call)
    assert path.startswith(str(folder / "a"))
    assert sorted(os.listdir(folder)) == there
    time.sleep(0.1)
    assert process.poll() is None
    shim.release()
    assert process.communicate(timeout=20)[0]
    assert process.returncode == 0


def test_a_process_dies_at_its_nth_call(start: Start, control: Path, folder: Path) -> None:
    Shim(control).kill_at("unlink", "disk/file-", nth=3)
    process = start(
        """
        for n in range(5):
            (folder / f"file-{n}").write_text("text")
        for n in range(5):
            os.unlink(folder / f"file-{n}")
        """
    )
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == ["file-2", "file-3", "file-4"]


STORE = """
from statebackend.errors import StateBackendError
from statebackend.rocks.store import Marker, RocksStore
marker = Marker(job_id="j", operator="o", key_group_start=0, key_group_end=1, epoch=1, chain="c")
store = RocksStore.open(str(folder / "db"))
store.apply([b"key"], [b"value" * 1000], marker)
turn(sys.argv[3], str(folder))
code = "ok"
try:
    store.flush()
except StateBackendError as error:
    code = error.code
say(code=code)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("fault", "code"), [("fsync-fails", "SB6002"), ("disk-full", "SB6001"), ("read-only", "SB6001")]
)
def test_a_rocksdb_store_on_such_a_disk_does_not_say_that_it_is_flushed(
    run: Run, control: Path, fault: str, code: str
) -> None:
    assert run(STORE, fault)["code"] == code
    assert Shim(control).refused()


def test_no_fault_outlasts_its_block(control: Path) -> None:
    shim = Shim(control)
    with shim.calm_afterwards():
        shim.fail_syncs(control.parent)
        shim.fill_disk(control.parent)
        shim.forbid_writes(control.parent)
        shim.shift_clock(5)
        shim.hold_at("link", "x")
        shim.kill_at("link", "x")
        assert len(list(control.iterdir())) == 6
    assert not list(control.iterdir())
