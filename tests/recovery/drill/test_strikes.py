"""Strikes of the catalogue on folders and processes of a test, without Spark."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.catalogue.disk_faults import places
from recovery.drill.catalogue.mid_operation_crashes import (
    CLEAN_UP,
    COMMIT,
    UPLOAD,
    Place,
    stopped_at,
)
from recovery.drill.catalogue.store_faults import OncePerKey
from recovery.drill.faults.shim import build_shim, environment
from recovery.drill.faults.stage import CannotStrikeError
from recovery.drill.proxy.fault_plan import Facts, Fault
from recovery.drill.proxy.fault_proxy import FaultProxy
from recovery.drill.proxy.s3_requests import Verb

FILES = ("db/CURRENT", "db/MANIFEST-000005", "db/000008.sst", "deltas/4-abc", "deltas/5-def")


@dataclass
class Host:
    name: str
    local_dir: Path


@dataclass
class Processes:
    """Writes down what is done to workers, and how the host's files looked then."""

    folder: Path
    done: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    at_freeze: Callable[[], object] = lambda: None

    def python_workers(self, host: str | None = None) -> list[int]:
        return [11, 12]

    def executors(self, host: str | None = None) -> list[int]:
        return self.working

    def freeze(self, pids: list[int]) -> None:
        self.at_freeze()
        self.done.append(("freeze", files_of(self.folder)))

    def kill(self, pids: list[int]) -> None:
        self.done.append(("kill", files_of(self.folder)))


class Stage:
    """As much of a stage as these strikes need; epochs go by."""

    proxy: FaultProxy | None = None
    ended = False

    def __init__(self, folder: Path, shim: Path | None = None) -> None:
        self.hosts = [Host("h1", folder / "local")]
        self.processes = Processes(folder / "local")
        self.store = folder / "store"
        self.shim = shim
        self._epoch = 0
        self.drivers = SimpleNamespace()

    def committed(self) -> int:
        self._epoch += 1
        return self._epoch

    def has_read_all(self) -> bool:
        return self.ended

    def pause(self, seconds: float) -> None:
        self.meanwhile()

    def meanwhile(self) -> None:
        """What the job does while a strike waits."""

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
        deadline_s = time.monotonic() + 20
        while not (found := condition()):
            assert time.monotonic() < deadline_s, f"waited for {what}"
            time.sleep(0.02)
        return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A host with two copies that count, and one that does not."""
    rng = random.Random(1)
    for subtask, names in (("0", ("aa", "old")), ("1", ("bb",))):
        folder = tmp_path / "local" / "job" / "op" / subtask
        for name in names:
            for file in FILES:
                path = folder / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rng.randbytes(200))
        (folder / "current").write_text(names[0])
    return Stage(tmp_path)


def test_only_copies_that_count_are_struck(stage: Stage) -> None:
    assert [(place.name, place.copy.name) for place in places(stage)] == [
        ("h1 op/0", "aa"),
        ("h1 op/1", "bb"),
    ]


@pytest.mark.parametrize("name", ["local-truncated", "local-flipped", "local-foreign"])
@pytest.mark.parametrize("seed", range(8))
def test_a_copy_is_damaged_while_its_host_lies_still(stage: Stage, name: str, seed: int) -> None:
    ALL[name].strike(stage, random.Random(seed))
    (first, before), (second, after) = stage.processes.done
    assert (first, second) == ("freeze", "kill")
    changed = {path for path in before if before[path] != after.get(path)}
    assert changed
    assert not [path for path in changed if "/old/" in path]
    if name == "local-flipped":
        (path,) = changed
        bits = int.from_bytes(before[path]) ^ int.from_bytes(after[path])
        assert bits.bit_count() == 1
    if name == "local-truncated":
        (path,) = changed
        assert before[path].startswith(after[path])
    if name == "local-foreign":
        assert {after[path] for path in changed} <= set(before.values())


@pytest.mark.parametrize("seed", range(8))
def test_what_is_deleted_is_gone_before_anybody_looks(stage: Stage, seed: int) -> None:
    ALL["local-deleted"].strike(stage, random.Random(seed))
    (_, before), (_, after) = stage.processes.done
    assert after.keys() < before.keys()


def test_a_copy_that_moves_until_its_host_lies_still_is_struck_where_it_is_then(
    stage: Stage,
) -> None:
    def move() -> None:
        for subtask, old in (("0", "aa"), ("1", "bb")):
            folder = stage.hosts[0].local_dir / "job" / "op" / subtask
            (folder / old).rename(folder / "moved")
            (folder / "current").write_text("moved")

    stage.processes.at_freeze = move
    assert ALL["local-flipped"].strike(stage, random.Random(1))
    (_, before), (_, after) = stage.processes.done
    assert [path for path in before if before[path] != after[path]]


STORE_FAULTS = ["store-slow", "store-throttled", "store-down", "answers-lost"]
STORE_FAULTS += ["credentials-expired"]


@pytest.mark.parametrize("name", STORE_FAULTS)
@pytest.mark.parametrize("ended", [False, True])
def test_a_store_s_fault_that_no_request_met_has_not_struck(
    stage: Stage, name: str, ended: bool
) -> None:
    stage.proxy, stage.ended = FaultProxy("127.0.0.1:9"), ended
    with pytest.raises(CannotStrikeError, match="read all its input" if ended else "within 60 s"):
        ALL[name].strike(stage, random.Random(1))


@pytest.mark.parametrize("name", ["store-slow", "store-down", "credentials-expired"])
def test_a_store_s_fault_that_a_request_met_has_struck(stage: Stage, name: str) -> None:
    with FaultProxy("127.0.0.1:9") as proxy:
        stage.proxy = proxy

        def ask() -> None:
            with suppress(OSError):
                urllib.request.urlopen(f"{proxy.url}/bucket/key", timeout=20)

        stage.meanwhile = ask
        assert ALL[name].strike(stage, random.Random(1))


@pytest.mark.parametrize("name", ["store-folder-failing", "clock-jumped"])
def test_a_fault_of_the_library_that_nobody_met_has_not_struck(stage: Stage, name: str) -> None:
    stage.shim = stage.store.parent / "control"
    stage.store.mkdir()
    with pytest.raises(CannotStrikeError, match="within 60 s"):
        ALL[name].strike(stage, random.Random(1))
    assert not list(stage.shim.iterdir())


def test_a_clock_has_jumped_when_a_process_at_work_goes_by_it(stage: Stage, tmp_path: Path) -> None:
    library = build_shim(tmp_path / "shim")
    if library is None:
        pytest.skip("no C compiler")
    stage.shim = tmp_path / "control"
    stage.shim.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile True: time.time(), time.sleep(0.02)"],
        env={**os.environ, **environment(library, stage.shim)},
    )
    stage.processes.working = [process.pid]
    stage.meanwhile = lambda: time.sleep(0.02)
    try:
        assert "all processes by" in ALL["clock-jumped"].strike(stage, random.Random(1))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("loser", "log", "said"),
    [
        (1, "the job was taken over [SB4001]", "the first was overtaken: SB4001"),
        (2, "[SB1016] another driver runs it", "the second was refused: SB1016"),
        (2, "no code of ours", "the second was refused: Spark's error"),
    ],
)
def test_of_two_drivers_it_is_said_which_one_gave_up_and_why(
    stage: Stage, loser: int, log: str, said: str
) -> None:
    folder = stage.store.parent / "drivers"
    folder.mkdir()
    (folder / "1.log").touch()

    def start_rival() -> None:
        (folder / "2.log").touch()
        (folder / f"{loser}.log").write_text(log)
        event = b'{"kind":"failed","error":"Spark\'s error\\nand more"}\n'
        (folder / f"{loser}.events").write_bytes(event + b'{"kind":"rea')

    stage.root, stage.drivers.start_another = folder.parent, start_rival
    stage.drivers.running = lambda: 1
    assert ALL["two-drivers"].strike(stage, random.Random(1)) == said


def test_the_second_look_at_damage_in_one_key_is_spared() -> None:
    plan = OncePerKey(Fault.corrupt_response(), frozenset({Verb.GET}))

    def met(key: str, verb: Verb = Verb.GET) -> bool:
        facts = Facts(number=1, verb=verb, key=key, group="log/", nth=1)
        return plan.decide(facts, seed=1) is not None

    assert [met("a"), met("a"), met("b"), met("b"), met("c", Verb.LIST)] == [
        *(True, False, True, False),
        False,
    ]


WRITER = """
import itertools, os, sys, time
from pathlib import Path
from snapshot.storage.local_store import LocalStore
while not Path(os.environ["SB_SHIM"], "hold-at").exists():
    time.sleep(0.02)
time.sleep(0.2)  # the library looks again only after a while
ids = map(str, itertools.count())
store = LocalStore(sys.argv[1], new_id=lambda: next(ids))
store.create("log/1.ckpt", [b"one"])
store.put_file("base/1/2/000008.sst", sys.argv[2])
store.delete(["log/1.ckpt"])
"""


@contextmanager
def writing(stage: Stage, library: Path, file: Path) -> Iterator[None]:
    """A process that commits, uploads and cleans, under the library."""
    assert stage.shim is not None
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, stage.store, file],
        env={
            **os.environ,
            **environment(library, stage.shim),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    try:
        yield
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize(
    ("place", "file", "makes"),
    [
        (COMMIT, "log/1.ckpt", True),
        (UPLOAD, "base/1/2/000008.sst", True),
        (CLEAN_UP, "log/1.ckpt", False),
    ],
    ids=["commit", "upload", "clean-up"],
)
def test_who_writes_to_a_folder_is_stopped_before_or_after_it_is_done(
    tmp_path: Path, place: Place, file: str, makes: bool, landed: bool
) -> None:
    library = build_shim(tmp_path / "shim")
    if library is None:
        pytest.skip("no C compiler")
    control = tmp_path / "control"
    control.mkdir()
    stage = Stage(tmp_path, control)
    sent = tmp_path / "sent"
    sent.write_bytes(b"table")
    with writing(stage, library, sent):
        with stopped_at(stage, place, landed=landed):  # type: ignore[arg-type]
            assert (stage.store / file).exists() == (makes == landed)
        assert not list(control.iterdir())
    assert not (stage.store / "log/1.ckpt").exists()
