"""Savepoints made of savepoints: renamed, without some, of two, with other key groups."""

from __future__ import annotations

from ast import literal_eval
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import statebackend
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import TTL, OperatorState, system
from statebackend.errors import NotRestorableError, SettingError
from tests.support import inprocess
from tests.support.begun_jobs import begun, location, saved
from tests.support.golden import Kept, Shared
from tests.support.inprocess import InProcessJob

STATES = ("last", "last_ttl", "all", "all_ttl", "times", "times_ttl", "most")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kept")
    job = InProcessJob(folder, time_mode="processing")
    job.start(Kept(), parallelism=2)
    for epoch in range(3):
        job.run([(key, epoch) for key in range(12)])
    return saved(folder, job)


def rows(savepoint: str, state: str, operator: str = "op") -> list[str]:
    found = statebackend.read_state("", None, operator, state, savepoint=savepoint).read_all()
    some = found.to_pylist()
    for row in some:
        row.pop("key_group", None)
    return sorted(map(repr, some))


def timers(savepoint: str, operator: str = "op") -> list[tuple[int, int]]:
    found = statebackend.read_timers("", None, operator, savepoint=savepoint).read_all()
    return sorted((row["key"]["k"], row["at_ms"]) for row in found.to_pylist())


def whole(savepoint: str) -> bool:
    return verify_savepoint(open_store(savepoint, new_id=system.new_id)).ok


def files(savepoint: statebackend.Savepoint) -> list[tuple[str, str]]:
    return sorted((file.name, file.digest) for file in savepoint.spark)


@pytest.mark.parametrize(
    "most", [None, *(pytest.param(most, marks=pytest.mark.full) for most in (1, 7, 1024))]
)
def test_nothing_else_changes(kept: str, tmp_path: Path, most: int | None) -> None:
    to = tmp_path.as_uri() + "/s"
    made = statebackend.edit_savepoint(kept, to, max_parallelism=most)
    assert whole(to)
    for name in STATES:
        assert rows(to, name) == rows(kept, name) != []
    assert timers(to) == timers(kept) != []
    was = statebackend.states("", savepoint=kept).to_pylist()
    now = statebackend.states("", savepoint=to).to_pylist()
    assert [(r["state"], r["ttl_ms"]) for r in now] == [(r["state"], r["ttl_ms"]) for r in was]
    assert {row["max_parallelism"] for row in now} == {most or 128}
    assert {row["parallelism"] for row in now} == {1 if most == 1 else 2}
    found = statebackend.epochs("", savepoint=to).to_pylist()
    assert [(row["epoch"], row["readable"]) for row in found] == [(2, True)]
    assert made.epoch == 2
    assert [name for name, _ in files(made)][:2] == ["commits/2", "metadata"]


def test_operators_and_states_are_renamed_and_dropped(kept: str, tmp_path: Path) -> None:
    to = tmp_path.as_uri() + "/s"
    statebackend.edit_savepoint(
        kept,
        to,
        rename_operators={"op": "counter"},
        rename_states={("op", "times_ttl"): "pages"},
        drop_states=[("op", "all_ttl"), ("op", "last")],
    )
    assert whole(to)
    names = [row["state"] for row in statebackend.states("", savepoint=to).to_pylist()]
    assert sorted(names) == ["all", "last_ttl", "most", "pages", "times"]
    assert rows(to, "pages", "counter") == rows(kept, "times_ttl")
    assert timers(to, "counter") == timers(kept)
    small = verify_savepoint(open_store(to, new_id=system.new_id))
    assert small.restorable == {"counter": [2]}
    entries = statebackend.edit_savepoint(kept, to + "-all").size_bytes
    made = statebackend.edit_savepoint(to, to + "-again")
    assert made.size_bytes < entries, "the entries of what was dropped are gone"


def given_operator(n: int) -> dict[str, OperatorState]:
    count = pa.table({"user": ["ann", "bob"], "n": [n, n + 1]})
    lists = pa.table({"subtask": [0, 1, 2], "n": [n, n, n]})
    rules = pa.table({"map_key": [{"w": "a"}], "n": [n]})
    one = OperatorState(
        "user string",
        {"count": count},
        operator_lists={"seen": lists, "every": lists},
        list_modes={"every": "union"},
        broadcast_maps={"rules": rules},
        time_mode="event",
    )
    return {"op": one}


def test_the_operators_of_two_savepoints_come_into_one(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    place = str(location(tmp_path / "checkpoint", 4))
    statebackend.write_savepoint(f"{uri}/a", given_operator(1), parallelism=3, watermark_ms=70)
    statebackend.write_savepoint(
        f"{uri}/b", given_operator(5), parallelism=3, watermark_ms=50, sources=place
    )
    with pytest.raises(SettingError, match="Two operators"):
        statebackend.edit_savepoint([f"{uri}/a", f"{uri}/b"], f"{uri}/c")
    statebackend.edit_savepoint(f"{uri}/b", f"{uri}/b2", rename_operators={"op": "other"})
    both = [f"{uri}/a", f"{uri}/b2"]
    made = statebackend.edit_savepoint(both, f"{uri}/c", max_parallelism=2)
    assert (made.epoch, made.watermark_ms, made.spark) == (3, 50, [])
    assert whole(f"{uri}/c")
    marks = statebackend.epochs("", savepoint=f"{uri}/c").to_pylist()
    assert {row["watermark_ms"] for row in marks} == {50}
    for operator, n in (("op", 1), ("other", 5)):
        assert rows(f"{uri}/c", "count", operator) == rows(
            f"{uri}/{'a' if n == 1 else 'b'}", "count"
        )
        for name in ("seen", "every", "rules"):
            found = rows(f"{uri}/c", name, operator)
            assert len(found) == (1 if name == "rules" else 3)
            assert all(f"{{'n': {n}}}" in row for row in found)
    chosen = statebackend.edit_savepoint(both, f"{uri}/d", sources=f"{uri}/b")
    assert (chosen.epoch, len(chosen.spark)) == (3, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rename_operators": {"x": "y"}}, "no 'x'"),
        ({"drop_operators": ["op"]}, "No operator is left"),
        ({"rename_operators": {"op": ""}}, "or one none"),
        ({"drop_states": [("op", "x")]}, "no 'op': 'x'"),
        ({"rename_states": {("op", "all"): "last"}}, "one name"),
        ({"max_parallelism": 1 << 20}, "max_parallelism"),
        ({"max_parallelism": 0}, "is 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    kept: str, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(statebackend.StateBackendError, match=said):
        statebackend.edit_savepoint(kept, tmp_path.as_uri() + "/s", **change)
    assert not (tmp_path / "s").exists() or not list((tmp_path / "s").iterdir())


def test_a_savepoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRestorableError):
        statebackend.edit_savepoint(tmp_path.as_uri() + "/x", tmp_path.as_uri() + "/s")
    with pytest.raises(SettingError, match="No savepoint was given"):
        statebackend.edit_savepoint([], tmp_path.as_uri() + "/s")


HISTORIES = st.lists(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=10), min_size=2, max_size=4
)


@pytest.mark.full  # a job and its restarts for each example
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    history=HISTORIES,
    cut=st.integers(1, 3),
    most=st.sampled_from([2, 5, 64, 300]),
    shared=st.booleans(),
)
def test_a_job_goes_on_exactly_with_other_key_groups(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    history: list[list[tuple[int, int]]],
    cut: int,
    most: int,
    shared: bool,
) -> None:
    folder = tmp_path_factory.mktemp("job")
    processor = Shared if shared else Kept
    mode = "none" if shared else "processing"
    cut = min(cut, len(history) - 1)

    def more(job: InProcessJob) -> list[Any]:
        out = [job.run(part) for part in history[cut:]]
        looks = [job.run([(key, -1) for key in range(9)])]
        return [sorted(one) for one in (*out, *looks)]

    job = InProcessJob(folder, time_mode=mode)
    job.start(processor(), parallelism=2)
    for part in history[:cut]:
        job.run(part, [("a", 1)] if shared else [])
    first = saved(folder, job)
    edited = f"file://{folder}/edited"
    statebackend.edit_savepoint(first, edited, max_parallelism=most)
    expected = more(job)
    with monkeypatch.context() as patched:
        patched.setattr(inprocess, "MAX_PARALLELISM", most)
        clone = begun(edited, folder / "clone", time_mode=mode)
        clone.start(processor(), parallelism=2)
        assert clone.epoch == cut
        assert _unplaced(more(clone), shared) == _unplaced(expected, shared)


def _unplaced(out: list[Any], shared: bool) -> Any:
    """Without what a subtask has seen beside a key: which keys share one is another matter."""
    if not shared:
        return out
    return [[(key, literal_eval(seen)[::2]) for key, seen in one] for one in out]


def test_an_expiring_map_is_rekeyed_with_its_index(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    ends = pa.array([1_000, 2_000])
    table = pa.table({"user": ["a", "b"], "map_key": [{"p": "x"}, {"p": "y"}], "n": [1, 2]})
    one = OperatorState(
        "user string",
        {"pages": table.append_column("expires_at_ms", ends)},
        ttl={"pages": TTL(100)},
    )
    statebackend.write_savepoint(f"{uri}/a", {"op": one}, max_parallelism=64)
    statebackend.edit_savepoint(f"{uri}/a", f"{uri}/b", max_parallelism=9)
    statebackend.edit_savepoint(f"{uri}/b", f"{uri}/c", max_parallelism=64)
    assert rows(f"{uri}/c", "pages") == rows(f"{uri}/b", "pages") == rows(f"{uri}/a", "pages")
    digests = [
        [s.digest for m in _manifests(f"{uri}/{name}") for s in m.slices] for name in ("a", "c")
    ]
    assert digests[0] == digests[1], "there and back is the same bytes, the index included"


def _manifests(uri: str) -> Any:
    from statebackend.tables.stored_job import find_job

    return find_job("", None, savepoint=uri).manifests
