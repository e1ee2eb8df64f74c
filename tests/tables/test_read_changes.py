"""What changed between two epochs: against what the state was at each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statebackend
from statebackend.errors import NotRestorableError, SettingError
from tests.support.golden import EPOCHS, Kept, keys_of
from tests.support.inprocess import InProcessJob

JOB = "job"
STATES = ("last", "last_ttl", "all", "all_ttl", "times", "times_ttl", "most")


class Forgetful(Kept):
    """As `Kept`; of a key that is a multiple of 3 it forgets all in the last epoch."""

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        rows = list(rows)
        if key[0] % 3 == 0 and rows[0].v == EPOCHS - 1:
            for state in (
                self.last,
                self.last_ttl,
                self.all,
                self.times,
                self.times_ttl,
                self.most,
            ):
                state.clear()
            return ()
        return super().process(key, rows, ctx)


def made(folder: Path, parallelism: tuple[int, ...] = (1,)) -> None:
    job = InProcessJob(
        folder / "run", name=JOB, time_mode="processing", retain_epochs=EPOCHS, base_every_epochs=2
    )
    (folder / "run" / "store").mkdir(parents=True)
    (folder / JOB).symlink_to(folder / "run" / "store")
    for epoch in range(EPOCHS):
        if epoch == 0 or (epoch == 3 and len(parallelism) > 1):
            job.start(Forgetful(), parallelism=parallelism[-1 if epoch else 0])
        job.run([(key, epoch) for key in keys_of(epoch)])


def rows(folder: Path, state: str, epoch: int) -> dict[str, Any]:
    found = statebackend.read_state(f"file://{folder}", JOB, "op", state, epoch=epoch).read_all()
    return {_place(row): row["value"] for row in found.to_pylist()}


def _place(row: dict[str, Any]) -> str:
    return repr([row.get(name) for name in ("key_group", "key", "index", "map_key")])


def changes(folder: Path, state: str, **given: Any) -> pa.Table:
    return statebackend.read_changes(f"file://{folder}", JOB, "op", state, **given).read_all()


@pytest.mark.parametrize("parallelism", [(1,), pytest.param((2, 3), marks=pytest.mark.full)])
@pytest.mark.parametrize("state", STATES)
def test_changes_are_the_difference_of_what_is_read_at_each_epoch(
    tmp_path: Path, state: str, parallelism: tuple[int, ...]
) -> None:
    made(tmp_path, parallelism)
    seen = set()
    for first, last in ((1, 4), (3, 4), (2, 2), (0, 3)):
        old, new = rows(tmp_path, state, first), rows(tmp_path, state, last)
        found = changes(tmp_path, state, from_epoch=first, to_epoch=last).to_pylist()
        got = {_place(row): (row["change"], row["before"], row["value"]) for row in found}
        assert len(got) == len(found)
        wanted: dict[str, Any] = {p: ("insert", None, new[p]) for p in new.keys() - old.keys()}
        wanted |= {p: ("delete", old[p], None) for p in old.keys() - new.keys()}
        wanted |= {
            p: ("update", old[p], new[p]) for p in old.keys() & new.keys() if old[p] != new[p]
        }
        assert got == wanted
        seen |= {kind for kind, _, _ in got.values()}
    if state in ("last", "most"):
        assert seen == {"insert", "update", "delete"}


def test_a_ttl_that_moved_on_is_an_update(tmp_path: Path) -> None:
    class Touching(Kept):
        def process(self, key: Any, rows: Any, ctx: Any) -> Any:
            self.last_ttl.update((1, "same", 0.5))
            return ()

    job = InProcessJob(tmp_path / "run", name=JOB, time_mode="processing", retain_epochs=3)
    (tmp_path / "run" / "store").mkdir(parents=True)
    (tmp_path / JOB).symlink_to(tmp_path / "run" / "store")
    job.start(Touching())
    for epoch in range(2):
        job.run([(7, epoch)])
    (row,) = changes(tmp_path, "last_ttl", from_epoch=0).to_pylist()
    assert row["change"] == "update"
    assert row["before"] == row["value"]


def test_keys_and_columns_are_chosen(tmp_path: Path) -> None:
    made(tmp_path)
    found = changes(tmp_path, "last", from_epoch=0, keys=[1, 2], columns=["key.k", "value.n"])
    assert set(found.column("key.k").to_pylist()) <= {1, 2}
    assert found.schema.names == ["key.k", "value.n"]


def test_epochs_in_the_wrong_order_or_gone_are_refused(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(SettingError, match="earlier epoch"):
        changes(tmp_path, "last", from_epoch=3, to_epoch=2)
    with pytest.raises(SettingError, match="earlier epoch"):
        changes(tmp_path, "last", from_epoch=77)
    with pytest.raises(NotRestorableError):
        changes(tmp_path, "last", from_epoch=0, to_epoch=77)


def test_nothing_is_left_in_the_scratch_folder(tmp_path: Path) -> None:
    made(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changes(tmp_path, "last", from_epoch=0, scratch_dir=str(scratch))
    assert not list(scratch.iterdir())
    with pytest.raises(SettingError):
        changes(tmp_path, "nothing", from_epoch=0, scratch_dir=str(scratch))
    assert not list(scratch.iterdir())
