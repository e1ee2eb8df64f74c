"""Strikes of the catalogue on folders and processes of a test, without Spark."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.catalogue.disks import places
from recovery.drill.catalogue.middles import CLEAN_UP, COMMIT, UPLOAD, Place, stopped_at
from recovery.drill.catalogue.stores import OncePerKey
from recovery.drill.faults import Facts, Fault
from recovery.drill.s3 import Verb
from recovery.drill.shim import build_shim, environment

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

    def python_workers(self, host: str | None = None) -> list[int]:
        return [11, 12]

    def freeze(self, pids: list[int]) -> None:
        self.done.append(("freeze", files_of(self.folder)))

    def kill(self, pids: list[int]) -> None:
        self.done.append(("kill", files_of(self.folder)))


class Stage:
    """As much of a stage as these strikes need; epochs go by."""

    proxy = None

    def __init__(self, folder: Path, shim: Path | None = None) -> None:
        self.hosts = [Host("h1", folder / "local")]
        self.processes = Processes(folder / "local")
        self.store = folder / "store"
        self.shim = shim
        self._epoch = 0

    def committed(self) -> int:
        self._epoch += 1
        return self._epoch

    def pause(self, seconds: float) -> None:
        pass

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
from snapshot.storage.local import LocalStore
while not Path(os.environ["SB_SHIM"], "hold-at").exists():
    time.sleep(0.02)
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
