"""Savepoints of a drill: asked for, looked at from outside, and what their clones put out."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.catalogue.savepoint_faults import HoldBelow
from recovery.drill.driver.batch_driver import _Watch
from recovery.drill.driver.driver_messages import JOB, DriverConfig, Taken
from recovery.drill.faults.shim import Shim
from recovery.drill.faults.stage import CannotStrikeError
from recovery.drill.proxy.fault_plan import Facts, Kind
from recovery.drill.proxy.s3_requests import Verb, group_of
from recovery.drill.savepoints.clones import clone_verdict, to_be_cloned
from recovery.drill.savepoints.drill_savepoints import Savepoints
from recovery.drill.savepoints.savepoint_findings import removed, verified
from recovery.inspect.job_list import BEGUN_NAME, SAVEPOINT_NAME
from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.savepoint import default_folder, read_savepoint
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import DrillError, StoreUnreachableError, UnsupportedQueryError
from tests.cli.folder import QUERY, Folder, new_id


class Asked:
    """The savepoints of a stage: writes down what is asked, and has an answer for it."""

    def __init__(self, said: list[str], answer: Taken | None, wrong: list[str]) -> None:
        self.taken: list[Taken] = []
        self._said, self._answer, self._wrong = said, answer, wrong

    def place(self) -> str:
        return "file:///nowhere/store/.savepoints/drill/drill-1"

    def ask(self, to: str = "") -> None:
        self._said.append(f"ask {to}".strip())

    def withdraw(self) -> None:
        self._said.append("withdraw")

    def answer(self) -> Taken | None:
        return self._answer

    def look(self, what: str, uri: str) -> list[str]:
        self._said.append(f"{what} {uri}")
        return self._wrong


class Stage:
    """A driver that comes to the place where it is held as soon as it is asked."""

    proxy = None

    def __init__(
        self, folder: Path, answer: Taken | None = None, wrong: tuple[str, ...] = ()
    ) -> None:
        self.root, self.shim = folder, folder / "control"
        self.shim.mkdir()
        self.said: list[str] = []
        self.savepoints = Asked(self.said, answer, list(wrong))
        self.holds = ""
        self.drivers = self

    def kill(self) -> None:
        self.said.append("kill")

    def start(self) -> None:
        self.said.append("start")

    def started(self) -> int:
        return 1

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        with suppress(FileNotFoundError):
            self.holds = (self.shim / "hold-at").read_text()
            if self.savepoints.answer() is None:
                (self.shim / "held").write_text("17 rename /a/b")
        found = condition()
        assert found, what
        return found


def test_a_savepoint_is_asked_for_and_left_for_the_end(tmp_path: Path) -> None:
    taken = Taken(uri="file:///s", epoch=4)
    stage = Stage(tmp_path, taken)
    assert ALL["savepoint-taken"].strike(stage, random.Random(1)) == "of epoch 4"  # type: ignore[arg-type]
    assert (stage.said, stage.savepoints.taken) == (["ask"], [taken])


def test_a_savepoint_that_failed_ends_the_drill(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Taken(error="SettingError: no"))
    with pytest.raises(DrillError, match="SettingError: no"):
        ALL["savepoint-taken"].strike(stage, random.Random(1))  # type: ignore[arg-type]
    assert stage.savepoints.taken == []


@pytest.mark.parametrize("uri", ["", "file:///s"])
def test_a_job_whose_clones_need_not_be_exact_is_not_struck(tmp_path: Path, uri: str) -> None:
    stage = Stage(tmp_path, Taken(uri=uri, cannot="of the source socket it is not known"))
    with pytest.raises(CannotStrikeError, match="socket"):
        ALL["savepoint-taken"].strike(stage, random.Random(1))  # type: ignore[arg-type]
    assert stage.savepoints.taken == []


def test_a_job_that_can_have_no_savepoint_is_not_struck_in_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Taken(cannot="there is a folder `state`"))
    with pytest.raises(CannotStrikeError, match="folder"):
        ALL["savepoint-crashed"].strike(stage, random.Random(1))  # type: ignore[arg-type]
    assert "withdraw" in stage.said
    assert "kill" not in stage.said


def test_a_driver_that_ends_while_it_takes_one_was_not_undisturbed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Taken(uri="file:///s", epoch=4))
    counts = iter([1, 2])
    stage.drivers.started = lambda: next(counts)  # type: ignore[method-assign]
    with pytest.raises(DrillError, match="driver ended"):
        ALL["savepoint-taken"].strike(stage, random.Random(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_the_driver_is_killed_between_two_copies(tmp_path: Path, seed: int) -> None:
    stage = Stage(tmp_path)
    target = ALL["savepoint-crashed"].strike(stage, random.Random(seed))  # type: ignore[arg-type]
    uri = stage.savepoints.place()
    assert stage.said == [f"ask {uri}", "kill", "withdraw", "start", f"remove {uri}"]
    when, call, nth, path = stage.holds.split()
    assert (call, path) == ("rename", "/nowhere/store/.savepoints/drill/drill-1/")
    assert target == f"at copy {nth}, which was {'done' if when == 'after' else 'not done'}"
    assert not Shim(stage.shim).held()
    assert not (stage.shim / "hold-at").exists()


def test_what_is_wrong_with_a_savepoint_that_was_cut_ends_the_drill(tmp_path: Path) -> None:
    stage = Stage(tmp_path, wrong=("it is listed after it was deleted",))
    with pytest.raises(DrillError, match="it is listed after"):
        ALL["savepoint-crashed"].strike(stage, random.Random(1))  # type: ignore[arg-type]


def test_one_that_was_finished_before_it_was_stopped_is_no_crash(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Taken(uri="file:///s", epoch=4))
    with pytest.raises(DrillError, match="was finished"):
        ALL["savepoint-crashed"].strike(stage, random.Random(1))  # type: ignore[arg-type]
    assert "withdraw" in stage.said


def test_on_s3_copies_are_held_below_the_savepoint_alone() -> None:
    plan = HoldBelow("/.savepoints/drill/drill-1/", 2)

    def held(key: str, verb: Verb = Verb.PUT) -> bool:
        facts = Facts(number=1, verb=verb, key=key, group=group_of(key), nth=1)
        fault = plan.decide(facts, seed=1)
        return fault is not None and fault.kind is Kind.HOLD

    mine = "token/.savepoints/drill/drill-1/"
    assert [
        held(f"{mine}data/1/a"),  # the first
        held("token/drill/data/1/a"),
        held("token/.savepoints/drill/drill-10/data/1/a"),
        held(f"{mine}log/1.ckpt", Verb.PUT_IF),
        held(f"{mine}data/1/a", Verb.GET),
        held(f"{mine}spark/metadata"),  # the second
        held(f"{mine}spark/offsets/3"),
    ] == [*[False] * 5, True, True]


# --- asking and answering ------------------------------------------------------------------------


def told(root: Path) -> DriverConfig:
    places = {"root": str(root), "uri": (root / "store").as_uri()}
    names = ("master", "local_dir", "checkpoint", "out", "events", "stop", "build", "commit")
    return DriverConfig(**places, **dict.fromkeys(names, ""), parallelism=1)  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def answers(root: Path, savepoint: Callable[..., Any], doubt: str = "") -> None:
    """A driver that looks once at what it is asked."""
    backend = SimpleNamespace(restores=list, epoch=None, savepoint=savepoint)
    query = SimpleNamespace(status={"message": "Processing new data"})
    _Watch(backend, query, None, root, lambda: doubt).look()  # type: ignore[arg-type]


def test_a_driver_answers_with_what_it_has_made(tmp_path: Path) -> None:
    savepoints = Savepoints(told(tmp_path), dict)
    asked: list[str | None] = []

    def savepoint(to: str | None, *, timeout_s: float) -> Any:
        asked.append(to)
        return SimpleNamespace(uri="file:///made", epoch=len(asked))

    for epoch, to in enumerate(("", savepoints.place(), savepoints.place()), start=1):
        savepoints.ask(to)
        assert savepoints.answer() is None, "the answer to the one before is gone"
        answers(tmp_path, savepoint)
        assert savepoints.answer() == Taken(uri="file:///made", epoch=epoch)
        answers(tmp_path, savepoint)  # asked nothing more
    folders = [default_folder((tmp_path / "store").as_uri(), JOB, f"drill-{n}") for n in (1, 2)]
    assert asked == [None, *folders]


def test_a_driver_that_cannot_says_why_and_runs_on(tmp_path: Path) -> None:
    def fails(to: str | None, *, timeout_s: float) -> Any:
        raise StoreUnreachableError("The store is away.", todo="Wait.")

    savepoints = Savepoints(told(tmp_path), dict)
    savepoints.ask()
    answers(tmp_path, fails)
    taken = savepoints.answer()
    assert taken is not None
    assert "The store is away." in taken.error


def test_of_a_job_that_can_have_none_or_whose_clones_may_differ_it_says_so(tmp_path: Path) -> None:
    def refused(to: str | None, *, timeout_s: float) -> Any:
        raise UnsupportedQueryError("There is a folder `state`.", todo="Leave it.")

    savepoints = Savepoints(told(tmp_path), dict)
    savepoints.ask()
    answers(tmp_path, refused)
    taken = savepoints.answer()
    assert taken is not None
    assert (taken.uri, taken.error) == ("", "")
    assert "folder `state`" in taken.cannot
    savepoints.ask()
    made = SimpleNamespace(uri="file:///made", epoch=4)
    answers(tmp_path, lambda to, timeout_s: made, doubt="not known")
    assert savepoints.answer() == Taken(uri="file:///made", epoch=4, cannot="not known")


def test_what_is_withdrawn_is_not_made(tmp_path: Path) -> None:
    savepoints = Savepoints(told(tmp_path), dict)
    savepoints.ask()
    savepoints.withdraw()
    answers(tmp_path, lambda *_, **__: pytest.fail("nobody asks"))
    assert savepoints.answer() is None


# --- looking from outside ------------------------------------------------------------------------


class Cut(Exception):
    """The driver is dead."""


class Saved:
    """A job, and savepoints of it where its others are listed."""

    def __init__(self, root: Path) -> None:
        self.root, self.uri = root, (root / "store").as_uri()
        self.job = Folder(self.open(job_folder(self.uri, JOB)), job=JOB)
        self.job.epochs(3, own=True)
        self.location = self.open((root / "checkpoint").as_uri())
        self.location.put("metadata", [json.dumps({"id": QUERY}).encode()])
        for batch in range(3):
            self.location.put(f"offsets/{batch}", [b'v1\n{}\n{"topic":{"0":1}}'])
            self.location.put(f"commits/{batch}", [b"v1\n{}"])

    def open(self, uri: str) -> ObjectStore:
        return open_store(uri, new_id=new_id)

    def save(self, name: str, *, copies: int | None = None) -> str:
        """One savepoint's URI; the driver dies after so many copies."""
        uri = default_folder(self.uri, JOB, name)
        left = [copies]

        def tick(size_bytes: int) -> None:
            if left[0] == 0:
                raise Cut
            if left[0] is not None:
                left[0] -= 1

        making = Making(
            store=self.job.store,
            job=JOB,
            location=StoreLocation(self.location),
            manifests=self.job.log.manifests,
            open_target=lambda savepoint_id: self.open(uri),
            new_id=new_id,
            now_ms=lambda: 1,
            writer="test",
            tick=tick,
        )
        with suppress(Cut):
            create_savepoint(making)
        return uri


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_a_savepoint_that_is_whole_is_found_so_also_by_another_process(saved: Saved) -> None:
    uri = saved.save("one")
    assert verified(uri, saved.uri, saved.open) == []
    assert Savepoints(told(saved.root), environment).look("verify", uri) == []


def test_every_damaged_or_missing_object_of_a_savepoint_is_found(saved: Saved) -> None:
    uri = saved.save("one")
    files = [path for path in Path(saved.open(uri).uri[7:]).rglob("*") if path.is_file()]
    objects = [path for path in files if ".tmp" not in path.parts]
    assert len(objects) > 10
    for path in objects:
        if path.name == BEGUN_NAME:  # it only says whose it was going to be
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert verified(uri, saved.uri, saved.open), path
        path.unlink()
        assert verified(uri, saved.uri, saved.open), path
        path.write_bytes(whole)
    assert verified(uri, saved.uri, saved.open) == []


@pytest.mark.parametrize("copies", range(6))
def test_what_is_left_of_one_that_was_cut_is_known_and_removed(saved: Saved, copies: int) -> None:
    whole = saved.save("whole")
    cut = saved.save("cut", copies=copies)
    assert any("never finished" in problem for problem in verified(cut, saved.uri, saved.open))
    assert removed(cut, saved.uri, saved.open) == []
    assert list(saved.open(cut).list("")) == []
    assert verified(whole, saved.uri, saved.open) == []


def test_one_that_was_finished_is_not_taken_for_one_that_was_cut(saved: Saved) -> None:
    uri = saved.save("whole")
    epoch = read_savepoint(saved.open(uri)).epoch
    wrong = removed(uri, saved.uri, saved.open)
    assert f"it reads as a savepoint of epoch {epoch}" in wrong
    assert "it is not listed as one that was never finished" in wrong


def test_a_savepoint_that_is_not_there_is_no_whole_one(saved: Saved) -> None:
    uri = saved.save("whole")
    saved.open(uri).delete([SAVEPOINT_NAME])
    assert verified(uri, saved.uri, saved.open)


def test_a_look_that_fails_is_said_with_its_error(saved: Saved) -> None:
    with pytest.raises(DrillError, match="no savepoint"):
        Savepoints(told(saved.root), environment).look(
            "remove", default_folder(saved.uri, JOB, "none")
        )


# --- clones --------------------------------------------------------------------------------------


def put_out(folder: Path, batches: dict[int, list[tuple[str, int]]]) -> Path:
    folder.mkdir()
    for batch, rows in batches.items():
        table = pa.table({"k": [k for k, _ in rows], "n": pa.array([n for _, n in rows])})
        pq.write_table(table, folder / f"{batch:010}.parquet")
    return folder


TRUTH = [("a", 1), ("a", 2), ("b", 1), ("a", 3)]
ORIGINAL = {0: [("a", 1)], 1: [("a", 2), ("b", 1)], 2: [("a", 3)], 3: [("b", 99)]}


@pytest.mark.parametrize(
    ("clone", "last", "exact"),
    [
        ({2: [("a", 3)]}, 2, True),
        ({2: [("a", 3)], 3: [("b", 2)]}, 2, True),  # what it has not committed does not count
        ({2: []}, 2, False),
        ({2: [("a", 3)], 3: [("a", 3)]}, 3, False),
        ({2: [("a", 4)]}, 2, False),
        ({1: [], 2: [("a", 3)]}, 2, False),  # a batch of the original again
        ({}, 1, False),  # it did nothing at all
    ],
)
def test_a_clone_must_put_out_what_the_original_had_left(
    tmp_path: Path, clone: dict[int, list[tuple[str, int]]], last: int, exact: bool
) -> None:
    original = put_out(tmp_path / "out", ORIGINAL)
    cloned = put_out(tmp_path / "clone", {n: rows for n, rows in clone.items() if rows})
    if 1 in clone:
        put_out(tmp_path / "again", {1: [("a", 2)]}).joinpath("0000000001.parquet").rename(
            cloned / "0000000001.parquet"
        )
    verdict = clone_verdict(TRUTH, original, cloned, epoch=1, last=last, keys=None)
    assert verdict.exact is exact


def test_of_a_job_with_keys_the_clone_s_rows_are_newer(tmp_path: Path) -> None:
    original = put_out(tmp_path / "out", ORIGINAL)
    clone = put_out(tmp_path / "clone", {2: [("a", 3)]})
    newest = [("a", 3), ("b", 1)]
    assert clone_verdict(newest, original, clone, epoch=1, last=2, keys=["k"]).exact


def test_the_first_and_the_last_savepoint_are_begun_with() -> None:
    taken = [Taken(uri=f"file:///{n}", epoch=n) for n in range(4)]
    assert [one.epoch for one in to_be_cloned(taken)] == [0, 3]
    assert to_be_cloned(taken[:1]) == taken[:1]
    assert to_be_cloned([]) == []


def test_what_is_told_is_read_as_it_was_written() -> None:
    taken = Taken(uri="file:///s", epoch=0)
    assert msgspec.json.decode(msgspec.json.encode(taken), type=Taken) == taken
