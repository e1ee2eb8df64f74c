"""A job as its store shows it; damage of every kind is found, named, and its meaning said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from recovery.inspect.describe import describe
from recovery.inspect.job_list import split_jobs, summarise
from recovery.inspect.verify import VerifyReport, verify
from snapshot.formats.file_index import decode_index
from snapshot.formats.record import FOOTER_BYTES, Manifest, encode_record, parse_record, record_name
from snapshot.storage import LocalStore, MemoryStore, ObjectInfo, ObjectStore
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import NotRestorableError, SettingError, StoreUnreachableError
from tests.cli.folder import JOB, OPERATOR, Folder, new_id


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    return LocalStore(tmp_path, new_id=new_id)


def flipped(store: ObjectStore, name: str, at: int) -> None:
    body = bytearray(store.get(name))
    body[at] ^= 0x10
    store.put(name, [body])


def found(store: ObjectStore) -> VerifyReport:
    report = verify(store, JOB)
    assert not report.ok
    return report


def tip(folder: Folder) -> Manifest:
    return folder.log.manifests()[-1]


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["", "base", "files"])
@pytest.mark.parametrize("own", [False, True])
def test_a_sound_job_has_no_findings(store: ObjectStore, base: str, own: bool) -> None:
    folder = Folder(store).epochs(3, own=own).claim().epochs(3, own=own, base=base)
    folder.check()
    report = verify(store, JOB)
    assert report.findings == []
    assert report.restorable == {OPERATOR: [4, 5]}
    assert report.lost == {}
    assert report.slices >= 8
    assert (report.files > 0) is (base == "files")


def test_a_job_that_only_was_claimed_has_no_findings(store: ObjectStore) -> None:
    Folder(store)
    report = verify(store, JOB)
    assert (report.ok, report.records, report.restorable) == (True, 1, {})


def test_no_log_at_all_is_said(store: ObjectStore) -> None:
    with pytest.raises(NotRestorableError, match="no commit log"):
        verify(store, JOB)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda size: size - 1, id="the footer's last byte"),
        pytest.param(lambda size: size - FOOTER_BYTES, id="the footer's first byte"),
        pytest.param(lambda size: size - FOOTER_BYTES + 9, id="the footer's version"),
        pytest.param(lambda size: size - FOOTER_BYTES + 13, id="the manifest's offset"),
        pytest.param(lambda size: size - FOOTER_BYTES + 21, id="the manifest's length"),
        pytest.param(lambda size: size - FOOTER_BYTES + 30, id="the manifest's digest"),
        pytest.param(lambda size: size - FOOTER_BYTES + 41, id="the total length"),
        pytest.param(lambda size: size - FOOTER_BYTES - 1, id="the manifest's end"),
        pytest.param(lambda size: size - FOOTER_BYTES - 100, id="the manifest's middle"),
    ],
)
@pytest.mark.parametrize("which", [-1, -2, -3])
def test_a_flipped_byte_of_a_record_s_frame_is_found(
    store: ObjectStore, place: Callable[[int], int], which: int
) -> None:
    folder = Folder(store).epochs(4)
    sequence = tip(folder).sequence + which + 1
    name = record_name(sequence)
    flipped(store, name, place(len(store.get(name))))
    report = found(store)
    finding = next(f for f in report.findings if f.object == name)
    assert finding.code in ("SB3001", "SB3002")
    assert "cannot be started" in finding.means
    assert not report.startable
    if which == -1:
        assert report.restorable == {OPERATOR: [1, 2]}  # what can be said without the tip
    else:
        assert report.lost[OPERATOR]
        gaps = [f for f in report.findings if not f.object]
        assert {f.epoch for f in gaps} == set(report.lost[OPERATOR])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_flipped_byte_of_a_slice_is_found_wherever_it_lies(
    store: ObjectStore, share: float
) -> None:
    folder = Folder(store).epochs(4)
    manifest = tip(folder)
    for entry in manifest.slices:
        assert entry.offset is not None
        at = entry.offset + int(share * entry.size_bytes)
        flipped(store, record_name(manifest.sequence), at)
        (finding,) = found(store).findings
        assert finding.object == record_name(manifest.sequence)
        assert (finding.operator, finding.subtask, finding.epoch) == (OPERATOR, entry.subtask, 3)
        assert finding.means == f"Operator {OPERATOR!r} cannot be restored to epoch 3."
        flipped(store, record_name(manifest.sequence), at)
    assert verify(store, JOB).ok


def test_damage_of_an_object_of_its_own_is_found(store: ObjectStore) -> None:
    folder = Folder(store).epochs(3, own=True)
    entry = tip(folder).slices[1]
    assert entry.object is not None
    body = store.get(entry.object)
    for bad in (body[:-1], body + b"x", b"", bytes(len(body))):
        store.put(entry.object, [bad])
        (finding,) = found(store).findings
        assert (finding.code, finding.object, finding.subtask) == ("SB3001", entry.object, 1)
    store.delete([entry.object])
    report = found(store)
    assert [(f.code, f.object) for f in report.findings] == [("SB2001", entry.object)]
    assert report.lost == {OPERATOR: [2]}
    assert report.restorable == {OPERATOR: [1]}


def test_a_slice_that_is_no_delta_is_found_though_its_digest_is_right(store: ObjectStore) -> None:
    folder = Folder(store).epochs(2)
    last = tip(folder)
    name = record_name(last.sequence)
    bodies = [parse_record(store.get(name), name).slice(entry) for entry in last.slices]
    lies = replace(last, slices=[replace(last.slices[0], rows=9), *last.slices[1:]])
    store.put(name, encode_record(lies, bodies))
    (finding,) = found(store).findings
    assert "has 2 rows, and its manifest says 9" in finding.problem


def test_damage_of_a_base_s_file_is_found_once_for_each_base_that_needs_it(
    store: ObjectStore,
) -> None:
    folder = Folder(store).epochs(2).epochs(2, base="files", own=True)
    ref = folder.lineage().subtasks[0].base_before(3)
    assert ref is not None
    for file in folder.index(ref).files:
        body = store.get(file.object)
        store.put(file.object, [body[:-1] + bytes([body[-1] ^ 1])])
        findings = found(store).findings
        assert {f.object for f in findings} == {file.object}
        # The shared file is named by the base before it too.
        assert len(findings) == (2 if file.name == "shared.sst" else 1)
        store.delete([file.object])
        assert {f.code for f in found(store).findings} == {"SB2001"}
        store.put(file.object, [body])
    assert verify(store, JOB).ok


def test_damage_of_an_index_is_found(store: ObjectStore) -> None:
    folder = Folder(store).epochs(2).epochs(1, base="files", own=True)
    ref = folder.lineage().subtasks[1].base_before(2)
    assert ref is not None
    assert ref.entry.object is not None
    body = store.get(ref.entry.object)
    assert decode_index(body).files
    flipped(store, ref.entry.object, 5)
    (finding,) = found(store).findings
    assert (finding.object, finding.subtask) == (ref.entry.object, 1)


def test_an_older_base_takes_the_place_of_a_damaged_one_if_its_deltas_are_there(
    store: ObjectStore,
) -> None:
    folder = Folder(store).epochs(2).epochs(1, base="base", own=True).epochs(1)
    folder.epochs(1, base="base", own=True)
    ref = folder.lineage().subtasks[0].base_before(4)
    assert ref is not None
    assert ref.entry.object is not None
    store.delete([ref.entry.object])
    report = found(store)
    (finding,) = report.findings
    assert "has to use an older base" in finding.means
    assert report.restorable == {OPERATOR: [3, 4]}


def test_a_record_that_is_not_there_is_a_gap(store: ObjectStore) -> None:
    folder = Folder(store).epochs(4)
    store.delete([record_name(tip(folder).sequence - 1)])
    report = found(store)
    assert any("is needed and not there" in f.problem for f in report.findings)
    assert report.lost == {OPERATOR: [3]}


def test_a_record_of_another_job_is_found(store: ObjectStore) -> None:
    folder = Folder(store).epochs(3)
    other = MemoryStore()
    Folder(other, job="other").epochs(3)
    name = record_name(tip(folder).sequence)
    store.put(name, [other.get(name)])
    assert any("of the job 'other'" in f.problem for f in found(store).findings)


def test_a_lineage_that_breaks_is_found_and_does_not_stop_the_rest(store: ObjectStore) -> None:
    folder = Folder(store).epochs(4, own=True)
    last = tip(folder)
    wrong = replace(last.slices[0], chain=last.slices[1].chain)
    broken = replace(last, slices=[wrong, *last.slices[1:]])
    store.put(record_name(last.sequence), encode_record(broken, [None, None]))
    victim = last.slices[1].object
    assert victim is not None
    store.delete([victim])
    problems = " ".join(f.problem for f in found(store).findings)
    assert "breaks the lineage" in problems
    assert victim in problems


def test_an_old_claim_that_does_not_read_is_found_and_harmless(store: ObjectStore) -> None:
    folder = Folder(store).epochs(2).epochs(3, base="base")
    assert tip(folder).oldest_needed > 0
    flipped(store, record_name(0), 3)
    report = found(store)
    (finding,) = report.findings
    assert finding.object == record_name(0)
    assert "Nothing that is needed" in finding.means
    assert report.lost == {}


def test_a_store_that_does_not_answer_is_no_finding() -> None:
    class Failing(MemoryStore):
        down = False

        def get(self, name: str) -> bytes:
            if self.down:
                raise StoreUnreachableError("The store is down.")
            return super().get(name)

    store = Failing()
    Folder(store).epochs(2)
    store.down = True
    with pytest.raises(StoreUnreachableError):
        verify(store, JOB)


def test_what_is_cleaned_while_it_is_read_is_no_finding() -> None:
    class Moving(MemoryStore):
        """The job goes on and cleans up as soon as somebody reads an object."""

        once = True

        def get(self, name: str) -> bytes:
            if name.startswith("data/") and self.once:
                type(self).once = False
                folder.epochs(2, own=True, base="base")
                oldest = tip(folder).oldest_needed
                gone = [m for m in before if m.sequence < oldest]
                self.delete([e.object for m in gone for e in m.slices if e.object])
                self.delete([record_name(m.sequence) for m in gone])
            return super().get(name)

    store = Moving()
    folder = Folder(store).epochs(3, own=True)
    before = folder.log.manifests()
    report = verify(store, JOB)
    assert (report.findings, report.lost) == ([], {})
    assert not Moving.once


def test_records_that_are_cleaned_while_the_log_is_read_are_no_gap() -> None:
    class Moving(MemoryStore):
        once = True

        def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
            if verifying and self.once:
                type(self).once = False
                folder.epochs(2, base="base")
                self.delete([record_name(s) for s in range(1, tip(folder).oldest_needed)])
            return super().get_tail(name, length)

    verifying: list[bool] = []
    store = Moving()
    folder = Folder(store).epochs(3)
    verifying.append(True)
    report = verify(store, JOB)
    assert (report.findings, report.lost, Moving.once) == ([], {}, False)


def test_large_slices_and_records_are_read_in_pieces(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.inspect.verify.WHOLE_BYTES", 10)
    monkeypatch.setattr("recovery.inspect.verify.SPOOL_BYTES", 40)
    folder = Folder(store).epochs(2).epochs(2, own=True, base="base").epochs(1, base="files")
    assert verify(store, JOB).ok
    last = tip(folder)
    assert last.slices[0].offset is not None
    flipped(store, record_name(last.sequence), last.slices[0].offset + 50)
    (finding,) = found(store).findings
    assert (finding.subtask, finding.epoch) == (0, 4)


def test_progress_ends_at_the_total(store: ObjectStore) -> None:
    Folder(store).epochs(3, own=True).epochs(2, base="files")
    told: list[tuple[int, int]] = []
    report = verify(store, JOB, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (report.size_bytes, report.size_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# --- describe and list ---------------------------------------------------------------------------


def test_a_description_says_what_the_log_holds(store: ObjectStore) -> None:
    folder = Folder(store).epochs(2, own=True).claim("host:2").epochs(2, base="files")
    one = describe(store, JOB)
    assert (one.job, one.job_id, one.query_id) == (JOB, folder.tenure.job_id, "query")
    assert (one.generation, one.sequence) == (2, 5)
    assert [(c.sequence, c.writer) for c in one.claims] == [(0, "host:1"), (3, "host:2")]
    (operator,) = one.operators
    assert (operator.uid, operator.parallelism, operator.max_parallelism) == (OPERATOR, 2, 8)
    assert operator.key_groups == [(0, 3), (4, 7)]
    assert operator.states == {"total": 1}
    assert operator.schemas == {"total": "bigint"}
    assert operator.epochs[-1] == 3
    assert [(b.subtask, b.epoch, b.kind, b.deltas) for b in operator.bases] == [
        (0, 2, "files", 1),
        (1, 2, "files", 1),
    ]
    assert all(base.size_bytes > 99 for base in operator.bases)
    assert (one.objects["records"], one.objects["data"]) == (6, 4)
    assert one.objects["bases"] == 10  # the shared files once
    total = sum(info.size_bytes for info in store.list(""))
    assert sum(one.size_bytes.values()) == total
    assert one.problems == []


def test_a_damaged_job_is_described_as_far_as_it_goes(store: ObjectStore) -> None:
    folder = Folder(store).epochs(3)
    flipped(store, record_name(tip(folder).sequence), -1)
    one = describe(store, JOB)
    assert one.sequence == 2
    assert len(one.problems) == 1


def test_jobs_are_told_from_what_else_is_there() -> None:
    listing = [
        ObjectInfo(f"{folder}/{name}", 5)
        for folder in ("a%2Fb", "clicks")
        for name in (record_name(0), "data/x")
    ]
    listing += [ObjectInfo("backup/file", 1), ObjectInfo("file", 1)]
    jobs = split_jobs("s3://bucket", listing)
    assert {job: [info.name for info in inside] for job, inside in jobs.items()} == {
        "a/b": [record_name(0), "data/x"],
        "clicks": [record_name(0), "data/x"],
    }
    assert job_folder("file:///x/", "a/b") == "file:///x/a%252Fb"
    with pytest.raises(SettingError, match="folder of one job"):
        split_jobs("s3://bucket", [ObjectInfo(record_name(0), 1)])


@pytest.mark.parametrize("scheme", ["file://", ""])
@pytest.mark.parametrize("job", ["plain", "a/b", "a%2Fb", "with space", "50%", "größe"])
def test_every_job_is_listed_by_the_name_that_opens_it(
    scheme: str, job: str, tmp_path: Path
) -> None:
    uri = scheme + str(tmp_path)
    Folder(open_store(job_folder(uri, job), new_id=new_id), job=job).epochs(1)
    (found,) = split_jobs(uri, open_store(uri, new_id=new_id).list(""))
    assert found == job
    assert verify(open_store(job_folder(uri, found), new_id=new_id), found).ok


def test_a_summary_reads_no_more_than_it_needs(store: ObjectStore) -> None:
    folder = Folder(store).epochs(3)
    folder.claim("host:9")
    one = summarise(store, JOB, store.list(""))
    assert (one.epoch, one.generation, one.writer, one.problem) == (2, 2, "host:9", "")
    assert one.objects == 5
    flipped(store, record_name(4), -1)
    damaged = summarise(store, JOB, store.list(""))
    assert damaged.epoch == 2
    assert record_name(4) in damaged.problem
