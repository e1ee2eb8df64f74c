"""Reading beside a job that goes on and cleans: a newer epoch is read, or the old one is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import statebackend
from snapshot.log.commit_log import CommitLog
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.errors import NotRestorableError
from statebackend.tables import state_scan as scan
from tests.support.golden import Kept, keys_of, values_of
from tests.support.inprocess import InProcessJob

JOB = "job"


class Going:
    """A job that, whenever a subtask is fetched, finishes two epochs first and cleans up."""

    def __init__(self, folder: Path, times: int, epochs: int = 3) -> None:
        self.folder, self.times, self.epoch = folder, times, 0
        (folder / "run" / "store").mkdir(parents=True)
        (folder / JOB).symlink_to(folder / "run" / "store")
        self.job = InProcessJob(
            folder / "run", name=JOB, time_mode="processing", base_every_epochs=1
        )
        self.job.start(Kept(), parallelism=2)
        self._run(epochs)
        self._fetch = scan.fetch_subtask

    def _run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.job.run([(key, self.epoch) for key in keys_of(self.epoch)])
            self.epoch += 1

    def __call__(self, *args: Any) -> Path:
        if self.times:
            self.times -= 1
            self._run(2)
            self._clean()
        return self._fetch(*args)

    def _clean(self) -> None:
        store = open_store(f"file://{self.folder}/run/store", new_id=system.new_id)
        log = CommitLog(store, job=JOB, writer="cleaner", new_id=system.new_id)
        view = lambda: outside_view(store, log)  # noqa: E731
        found = clean(store, view, min_age_ms=0, dry_run=False, prefixes=ALL_PREFIXES)
        assert found.removed, "nothing was cleaned: the test shows nothing"

    def read(self, **given: Any) -> dict[int, list[int]]:
        with mock.patch.object(scan, "fetch_subtask", self):
            found = statebackend.read_state(f"file://{self.folder}", JOB, "op", "all", **given)
            rows = found.read_all().to_pylist()
        lists: dict[int, list[int]] = {}
        for row in rows:
            lists.setdefault(row["key"]["k"], []).append(row["value"]["v"])
        return lists


@pytest.mark.parametrize("times", [1, 2])
def test_the_newest_epoch_is_read_again_if_it_was_cleaned_meanwhile(
    tmp_path: Path, times: int
) -> None:
    job = Going(tmp_path, times)
    assert job.read() == {k: found for k in range(10) if (found := values_of(k, job.epoch))}
    assert job.times == 0


def test_an_epoch_that_was_asked_for_is_said_to_be_gone(tmp_path: Path) -> None:
    job = Going(tmp_path, 1)
    with pytest.raises(NotRestorableError, match="epoch 2"):
        job.read(epoch=2)
