"""A job that makes its bases apart: its state comes back from them, whatever was lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recovery.local.store_pool import StorePool
from recovery.restore.restorer import OpenSubtask
from snapshot.formats.file_index import decode_index
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import SliceRef
from snapshot.protocol.messages import BaseGrant
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError
from tests.recovery.driver import Changes, new_id
from tests.recovery.local.open_stores import keeping
from tests.recovery.restore.one_subtask_job import Job
from tests.recovery.upload.uploads import Voice, grant_of, tables, upload
from tests.support.failing_store import FailingStore, Failure

POLICY = BasePolicy(every_epochs=2, apart_every_epochs=4, apart_min_bytes=1 << 30, lease_s=5.0)


class ApartJob(Job):
    """One whose state is too large for its records."""

    def __init__(
        self,
        root: Path,
        kind: str,
        store: ObjectStore | None = None,
        store_pool: StorePool | None = None,
    ) -> None:
        self.time_s = 0.0
        super().__init__(
            root,
            budget=600,
            apart=True,
            store=store,
            store_pool=store_pool,
            policy=POLICY,
            now_s=lambda: self.time_s,
            whole_limit_bytes=0 if kind == "files" else 1 << 20,
        )

    def upload(self, opened: OpenSubtask, grant: BaseGrant) -> None:
        opened.store.flush()
        super().upload(opened, grant)

    def base(self) -> SliceRef | None:
        lineage = self.started.coordinator.run.lineages.get("op")
        running = self.started.coordinator.run.operators.get("op")
        known = running.lineage if running else lineage
        return known.subtasks[0].base_before(10**9) if known else None

    def objects(self, ref: SliceRef) -> list[str]:
        """Everything that a base consists of."""
        data = self.started.session._records.index(ref) if ref.entry.kind == "files" else b""
        files = [file.object for file in decode_index(data).files] if data else []
        return [*files, *([ref.entry.object] if ref.entry.object else [])]

    def run_to(self, epoch: int, host: str = "h") -> None:
        while self.epoch < epoch:
            self.run(changes_of(self.epoch), host=host)

    def run_to_base(self, number: int, host: str = "h") -> SliceRef:
        """Until the record that names the base of that number is the last one."""
        seen: list[int] = []
        while len(seen) < number:
            self.run_to(self.epoch + 1, host)
            ref = self.base()
            if ref is not None and ref.entry.epoch not in seen:
                seen.append(ref.entry.epoch)
            assert self.epoch < 60
        assert ref is not None
        return ref


def changes_of(epoch: int) -> Changes:
    keys = {b"\0\0%02d" % (epoch % 7): os.urandom(200), b"\0\1%02d" % (epoch % 3): None}
    return {**keys, b"\0\2k": b"%d" % epoch}


KINDS = ["base", "files"]


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_from_a_base_that_was_made_apart(tmp_path: Path, kind: str) -> None:
    job = ApartJob(tmp_path, kind)
    ref = job.run_to_base(2)
    assert ref.entry.kind == kind
    assert ref.entry.epoch < job.epoch - 1  # it was named by a later record than its own epoch's
    for more in range(3):
        job.run_to(job.epoch + min(more, 1))
        report = job.reopened(f"elsewhere{more}")  # compares marker and content
        assert report.source == "durable"
        files = len(job.objects(ref)) + 1 if kind == "files" else 1
        assert report.durable_reads == files + job.epoch - 1 - ref.entry.epoch
    job.run_to(job.epoch + 3, "elsewhere2")


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_bit_flipped_in_any_object_of_a_base_an_older_way_is_taken_or_it_is_named(
    tmp_path: Path, kind: str
) -> None:
    job = ApartJob(tmp_path, kind)
    ref = job.run_to_base(2)
    for last in (True, False):
        names = job.objects(ref)
        assert names
        for name in names:
            data = job.store.get(name)
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            for damage in ([flipped], None):
                if damage is None:
                    job.store.delete([name])
                else:
                    job.store.put(name, damage)
                job.restart()
                if last:  # the record before still holds the base before, and all deltas since
                    report = job.reopened(new_id())
                    assert report.source == "durable"
                    assert name in report.reason
                else:
                    with pytest.raises(CorruptionError, match=ref.entry.kind) as caught:
                        job.open(new_id())
                    assert f"epoch {ref.entry.epoch}" in caught.value.what
                    job.restart()
                    assert job.reopened("h").source == "local"
                job.store.put(name, [data])
        job.run_to(job.epoch + 1)


def test_after_a_restore_from_files_the_next_base_names_what_was_inherited(tmp_path: Path) -> None:
    with keeping() as store_pool:  # closed after every epoch, it would merge its files
        job = ApartJob(tmp_path, "files", store_pool=store_pool)
        first = job.run_to_base(1)
        given = job.started.session._records.index(first)
        job.restart()
        opened, voice = job.open("elsewhere"), Voice()
        reply = opened.reply
        grant = grant_of(reply.durable_epoch, index=given, chain=reply.durable_chain)
        upload(opened.directory, grant, job.store, voice).run()
        opened.directory.release()
    inherited, index = tables(decode_index(given)), decode_index(voice.told[0].part.data)
    assert inherited.items() < tables(index).items()
    assert voice.told[0].uploaded_bytes < index.size_bytes


def test_a_base_of_deltas_that_is_damaged_gives_way_to_one_of_files(tmp_path: Path) -> None:
    job = ApartJob(tmp_path, "files")
    job.run_to_base(1)
    job.options["whole_limit_bytes"] = 1 << 20
    job.restart()
    ref = job.run_to_base(2)
    assert ref.entry.kind == "base"
    (name,) = job.objects(ref)
    job.store.put(name, [b"torn"])
    report = job.reopened("elsewhere")
    assert report.source == "durable"
    assert name in report.reason


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_fails_is_made_again_as_soon_as_it_can_be(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryStore()
    down = [True]

    def plan(verb: str, name: str, number: int) -> Failure:
        return "before" if down[0] and name.startswith("base/") and verb[:3] == "put" else None

    job = ApartJob(tmp_path, kind, FailingStore(inner, plan))
    job.run_to(20)
    assert job.base() is None
    assert not job.uploads
    by_driver = [one.message for one in caplog.records if one.name == "statebackend.coordinator"]
    assert all("was given up" in said and "SB2002" in said for said in by_driver)
    assert by_driver
    down[0] = False
    job.run_to(21)  # its grant was given back
    assert len(job.uploads) == 1
    job.run_to_base(1)
    assert job.reopened("elsewhere").source == "durable"


def test_a_base_under_a_lapsed_grant_is_refused_and_never_named(tmp_path: Path) -> None:
    job = ApartJob(tmp_path, "files")
    told = job.upload

    def too_late(opened: OpenSubtask, grant: BaseGrant) -> None:
        job.time_s += POLICY.lease_s + 1
        told(opened, grant)

    job.upload = too_late  # type: ignore[method-assign]
    job.run_to(30)
    assert job.base() is None
    assert not list(job.directory("h").glob("work/*"))
