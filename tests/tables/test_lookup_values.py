"""Values of many keys out of the entries that were found: each as its processor has it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import Row

import statebackend
from statebackend.system import SYSTEM
from statebackend.tables.state_lookup import LookedUp, _Copies, _Reading
from statebackend.tables.state_scan import state_source
from statebackend.tables.stored_job import StoredJob, find_job
from statebackend.tables.wanted_keys import encoded_each
from tests.support.golden import WEEK
from tests.tables.erased_jobs import ANN, JOB, OTHERS, Going

NEVER_MS, LATE_MS = 0, 1 << 60


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Going:
    return Going(tmp_path_factory.mktemp("lookups"), epochs=3)


def values(
    found: StoredJob, state: str, keys: list[Any], *, now_ms: int = NEVER_MS, copies: Any = None
) -> list[Any]:
    operator = found.operator("op")
    source = state_source(operator, state, keys)
    entries = (copies or _Copies(SYSTEM)).entries(found, source)
    groups = operator.lineage.max_parallelism
    return _Reading(source, entries, now_ms).values(encoded_each(keys, operator.key_schema, groups))


def stored(going: Going) -> StoredJob:
    return find_job(going.uri, JOB)


EXPECTED = {
    "last": Row(n=2, word="w2", gone=0.5),
    "most": Row(n=2),
    "all": [Row(v=0), Row(v=1), Row(v=2)],
    "times": {Row(word=f"w{n}"): Row(n=n) for n in range(3)},
}


@pytest.mark.parametrize("state", [*EXPECTED, "last_ttl", "all_ttl", "times_ttl"])
def test_each_key_has_its_value_in_the_order_that_was_asked_for(going: Going, state: str) -> None:
    expected = EXPECTED[state.removesuffix("_ttl")]
    asked = [5, ANN, -7, 0, ANN]  # one is not there, one is asked for twice
    found = values(stored(going), state, asked)
    assert found == [expected, expected, None, expected, expected]
    row = found[0][0] if isinstance(found[0], list) else found[0]
    names = next(iter(row)).__fields__ if isinstance(row, dict) else row.__fields__
    assert names
    assert values(stored(going), state, []) == []


@pytest.mark.parametrize("state", ["last_ttl", "all_ttl", "times_ttl"])
def test_what_has_expired_is_not_there(going: Going, state: str) -> None:
    found = stored(going)
    assert found.operator("op").state(state).declared.ttl_ms == WEEK.ms
    assert values(found, state, [ANN], now_ms=LATE_MS) == [None]


def test_keys_of_maps_with_parts_have_a_hash_and_parts_are_rows(tmp_path: Path) -> None:
    keys = pa.struct({"tags": pa.list_(pa.string()), "at": pa.struct({"x": pa.int64()})})
    rows = pa.table(
        {
            "user": ["ann"],
            "map_key": pa.array([{"tags": ["a", "b"], "at": {"x": 1}}], keys),
            "value": [{"place": {"y": 2}, "sizes": [3]}],
        }
    )
    to = f"file://{tmp_path}/saved"
    one = statebackend.OperatorState("user string", {"places": rows})
    statebackend.write_savepoint(to, {"op": one})
    ((key, value),) = values(find_job("", None, savepoint=to), "places", ["ann"])[0].items()
    assert key == Row(tags=("a", "b"), at=Row(x=1))
    assert value == Row(place=Row(y=2), sizes=[3])
    assert value.place.y == 2


def test_a_run_that_has_not_begun_an_epoch_leaves_it_to_the_log() -> None:
    run = SimpleNamespace(operators={}, epoch=None)
    session: Any = SimpleNamespace(looked_at=lambda look: look(run))
    assert LookedUp(session, lambda: 7).confirmed() is None


def test_a_copy_of_before_is_not_taken_for_an_epoch_that_was_written_anew(tmp_path: Path) -> None:
    going, copies = Going(tmp_path, epochs=2), _Copies(SYSTEM)
    before = values(stored(going), "last", [ANN, 1], copies=copies)
    assert None not in before
    epoch = stored(going).epoch
    going.erase()
    assert stored(going).epoch == epoch
    assert values(stored(going), "last", [ANN, 1], copies=copies) == [None, before[1]]


@pytest.mark.full  # RocksDB is opened some 30 times
def test_threads_do_not_remove_what_others_read(going: Going) -> None:
    copies, states = _Copies(SYSTEM), [*EXPECTED] * 4
    earlier = find_job(going.uri, JOB, epoch=stored(going).epoch - 1)

    def ask(number: int) -> list[Any]:
        found = earlier if number % 2 else stored(going)  # each pushes the other's copy out
        return values(found, states[number], [ANN, *OTHERS], copies=copies)

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(ask, range(len(states))):
            assert None not in found
