"""What may be deleted at every cut of a deletion: a model of drivers and of late cleaners."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from snapshot.formats.file_index import FileEntry, FileIndex
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.formats.record import Manifest, SliceEntry, parse_record_name, record_name
from snapshot.retention.deletable import Garbage, RecordKind, View, classify, view_of
from tests.snapshot.retained import digest, entry, info, manifest

# --- a model of drivers, and of cleaners who act late --------------------------------------------


SUBTASKS = 2


@dataclass
class Base:
    """A base that is being uploaded, or waits for a record."""

    subtask: int
    epoch: int
    grant: str
    index: FileIndex
    done: bool = False


@dataclass
class Driver:
    """A tenure with its memory; it may have been fenced without knowing."""

    generation: int
    manifests: list[Manifest]
    kinds: dict[int, RecordKind]
    slot: int
    epoch: int  # that runs: acks of it are taken; the one before is confirmed
    acked: dict[int, SliceEntry] = field(default_factory=dict)
    bases: dict[int, Base] = field(default_factory=dict)
    fenced: bool = False


@dataclass
class Cleaning:
    """A cleaner that has listed and looked, and may be frozen anywhere from here on."""

    garbage: Garbage
    left: list[str]


class Jobs(RuleBasedStateMachine):
    """The job's folder: names only. The log's manifests are the truth that restores go by."""

    @initialize()
    def start(self) -> None:
        self.log: dict[int, Manifest] = {}
        self.indexes: dict[str, FileIndex] = {}
        self.objects: set[str] = set()
        self.drivers: list[Driver] = []
        self.cleanings: list[Cleaning] = []
        self.listing: set[str] = set()
        self.stale_logs = False
        self.ids = itertools.count()
        self.claim(repeat=False)

    # what a restore reads

    def tip(self) -> Manifest:
        return self.log[max(self.log)]

    def live(self) -> list[Manifest]:
        tip = self.tip()
        return [self.log[s] for s in range(tip.oldest_needed, tip.sequence + 1)]

    @staticmethod
    def lineage(manifests: Iterable[Manifest]) -> dict[tuple[int, str, int], tuple[int, Any]]:
        """(subtask, delta or base, epoch) -> (sequence, slice); a repeated epoch replaces."""
        found: dict[tuple[int, str, int], tuple[int, Any]] = {}
        for one in manifests:
            if one.kind != "checkpoint":
                continue
            found = {key: value for key, value in found.items() if key[2] < one.epoch}
            for part in one.slices:
                kind = "delta" if part.kind == "delta" else "base"
                found[part.subtask, kind, part.epoch] = (one.sequence, part)
        return found

    @classmethod
    def needed(cls, manifests: Iterable[Manifest], epoch: int) -> list[tuple[int, SliceEntry]]:
        """What restoring ``epoch`` reads; asserts that there is no gap."""
        found = cls.lineage(manifests)
        wanted = []
        for subtask in range(SUBTASKS):
            bases = [e for s, kind, e in found if (s, kind) == (subtask, "base") and e <= epoch]
            first = 0
            if bases:
                wanted.append(found[subtask, "base", max(bases)])
                first = max(bases) + 1
            wanted += [found[subtask, "delta", e] for e in range(first, epoch + 1)]
        return wanted

    def tip_epoch(self) -> int:
        return max((m.epoch for m in self.live()), default=-1)

    # drivers

    def one(self, data: st.DataObject) -> Driver:
        """Mostly the one that holds the job, at times one that was fenced."""
        any_of_them = data.draw(st.integers(0, 3), label="any of them") == 3
        return data.draw(st.sampled_from(self.drivers)) if any_of_them else self.drivers[-1]

    @rule(data=st.data(), epochs=st.integers(1, 3), every=st.integers(1, 3))
    def run(self, data: st.DataObject, epochs: int, every: int) -> None:
        """The driver goes on as it should: deltas, a base now and then, a record, the next."""
        driver = self.drivers[-1]
        for epoch in range(driver.epoch, driver.epoch + epochs):
            for subtask in range(SUBTASKS):
                name = self.upload(data_name(driver.generation, epoch, f"d{next(self.ids)}"))
                self.somebody_cleans(data)
                driver.acked[subtask] = entry(epoch, subtask=subtask, object=name)
                if (epoch + subtask) % every == 0:
                    self.begin_base(data, driver, subtask)
                    self.somebody_cleans(data)
                    self.end_base(driver, subtask)
            self.somebody_cleans(data)
            self.write(driver)
            self.begin_next(driver)

    def somebody_cleans(self, data: st.DataObject) -> None:
        """Lists and looks, perhaps with a pause between the two, and deletes; or not all yet."""
        step = data.draw(st.sampled_from(["", "", "", "list", "driver", "other", "outsider"]))
        if step == "list":
            self.list_objects()
        elif step:
            if data.draw(st.booleans(), label="list now"):
                self.list_objects()
            if step == "outsider":
                self.outsider_looks(fresh=False)
            else:
                last = step == "driver"
                driver = self.drivers[-1] if last else data.draw(st.sampled_from(self.drivers))
                self.add_cleaning(self.listing, self.view_of_driver(driver))
            self.go_on(self.cleanings[-1], data.draw(st.sampled_from([0, 30, 60, 100])))

    @rule(repeat=st.booleans())
    def claim(self, repeat: bool) -> None:
        """A new driver; it goes on after the tip's epoch, or repeats it."""
        before = self.tip() if self.log else None
        sequence = before.sequence + 1 if before else 0
        generation = before.generation + 1 if before else 1
        oldest = before.oldest_needed if before else 0
        one = manifest(sequence, "claim", generation=generation, oldest_needed=oldest)
        self.log[sequence] = one
        self.objects.add(record_name(sequence))
        epochs = [m.epoch for m in self.live() if m.kind == "checkpoint"]
        last = epochs[-1] if epochs else -1
        kinds = {s: m.kind for s, m in self.log.items() if record_name(s) in self.objects}
        epoch = last if repeat and last >= 0 else last + 1
        self.drivers.append(Driver(generation, self.live(), kinds, sequence + 1, epoch))

    def upload(self, name: str) -> str:
        self.objects.add(name)
        return name

    @rule(data=st.data(), subtask=st.integers(0, SUBTASKS - 1), ack=st.booleans())
    def snapshot(self, data: st.DataObject, subtask: int, ack: bool) -> None:
        """An attempt uploads its delta, and acks or is lost; of any driver, fenced or not."""
        driver = self.one(data)
        name = data_name(driver.generation, driver.epoch, f"d{next(self.ids)}")
        if data.draw(st.booleans(), label="inline"):
            driver.acked[subtask] = entry(driver.epoch, subtask=subtask)
            return
        self.upload(name)
        if ack:
            driver.acked[subtask] = entry(driver.epoch, subtask=subtask, object=name)

    @rule(data=st.data(), subtask=st.integers(0, SUBTASKS - 1))
    def grant(self, data: st.DataObject, subtask: int) -> None:
        """A base of the state before the running epoch; it takes over files of the one before."""
        self.begin_base(data, self.one(data), subtask)

    def begin_base(self, data: st.DataObject, driver: Driver, subtask: int) -> None:
        epoch = driver.epoch - 1
        if subtask in driver.bases or epoch < 0:
            return
        known = self.lineage(driver.manifests)
        epochs = [e for s, kind, e in known if (s, kind) == (subtask, "base") and e <= epoch]
        files: list[FileEntry] = []
        if epochs:
            before = self.indexes[known[subtask, "base", max(epochs)][1].digest]
            files = data.draw(st.lists(st.sampled_from(before.files), unique_by=lambda f: f.name))
        grant = f"g{next(self.ids)}"
        for _ in range(2):
            file = f"{next(self.ids)}.sst"
            name = base_file_name(driver.generation, grant, file)
            files.append(FileEntry(name=file, object=name, size_bytes=1, digest=""))
        index = FileIndex(incarnation="i", files=files)
        driver.bases[subtask] = Base(subtask, epoch, grant, index)
        self.upload(files[-1].object)  # half of it is there already

    @rule(data=st.data(), how=st.sampled_from(["finish", "lapse"]))
    def end_upload(self, data: st.DataObject, how: str) -> None:
        driver = self.one(data)
        running = [base for base in driver.bases.values() if not base.done]
        if not running:
            return
        base = data.draw(st.sampled_from(running))
        if how == "lapse":
            del driver.bases[base.subtask]
        else:
            self.end_base(driver, base.subtask)

    def end_base(self, driver: Driver, subtask: int) -> None:
        base = driver.bases.get(subtask)
        if base is None:
            return
        for file in base.index.files:
            if file.object.split("/")[2] == base.grant:
                self.upload(file.object)
        base.done = True

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """The record of the running epoch, by any driver; then the next epoch begins, or not."""
        driver = self.one(data)
        self.write(driver)
        if data.draw(st.booleans(), label="begin the next"):
            self.begin_next(driver)

    def begin_next(self, driver: Driver) -> None:
        if driver.manifests[-1].epoch == driver.epoch:
            driver.epoch += 1
            driver.acked.clear()

    def write(self, driver: Driver) -> None:
        if driver.fenced:
            return
        slices = []
        for subtask in range(SUBTASKS):
            slices.append(driver.acked.get(subtask) or entry(driver.epoch, subtask=subtask))
            base = driver.bases.get(subtask)
            if base is not None and base.done:
                key = digest(base.grant)
                self.indexes[key] = base.index
                slices.append(entry(base.epoch, "files", subtask, digest=key))
        sequences = [s for s, _ in self.needed(driver.manifests, driver.epoch - 1)]
        last = [m.sequence for m in driver.manifests if m.epoch == driver.epoch - 1]
        oldest = min(sequences + last[-1:], default=driver.manifests[-1].oldest_needed)
        one = manifest(
            driver.slot,
            generation=driver.generation,
            oldest_needed=max(oldest, driver.manifests[-1].oldest_needed),
            slices=slices,
            epoch=driver.epoch,
        )
        if record_name(driver.slot) in self.objects:
            driver.fenced = True
            return
        assert driver.slot not in self.log, "a slot was given twice"
        self.log[driver.slot] = one
        self.objects.add(record_name(driver.slot))
        driver.kinds[driver.slot] = "checkpoint"
        driver.slot += 1
        for base in [b for b in driver.bases.values() if b.done]:
            del driver.bases[base.subtask]
        kept = [m for m in driver.manifests if m.sequence >= one.oldest_needed]
        driver.manifests = [*kept, one]

    # cleaners

    @rule(stale_log=st.integers(0, 9))
    def list_objects(self, stale_log: int = 0) -> None:
        self.listing = set(self.objects)
        self.stale_logs |= stale_log == 9

    def view_of_driver(self, driver: Driver) -> View:
        pending = [part.object for part in driver.acked.values() if part.object]
        return view_of(
            driver.manifests,
            self.indexes,
            kinds=driver.kinds,
            own_generation=driver.generation,
            confirmed_epoch=driver.epoch,
            open_grants=[base.grant for base in driver.bases.values()],
            pending=pending,
        )

    @rule(data=st.data())
    def driver_looks(self, data: st.DataObject) -> None:
        """After the last listing, however long ago that was."""
        driver = self.one(data)
        self.add_cleaning(self.listing, self.view_of_driver(driver))

    @rule(fresh=st.booleans())
    def outsider_looks(self, fresh: bool) -> None:
        there = {s for s in self.log if record_name(s) in self.objects}
        kinds = {s: self.log[s].kind for s in there}
        view = view_of(self.live(), self.indexes, kinds=kinds)
        self.add_cleaning(self.objects if fresh else self.listing, view)

    def add_cleaning(self, names: Iterable[str], view: View) -> None:
        if not self.stale_logs:  # the log is listed last
            log = {name for name in self.objects if name.startswith("log/")}
            names = {name for name in names if not name.startswith("log/")} | log
        garbage = classify([info(name) for name in names], view)
        left = [name for batch in garbage.deletions() for name in batch]
        self.cleanings.append(Cleaning(garbage, left))

    @precondition(lambda self: self.cleanings)
    @rule(data=st.data(), share=st.integers(1, 100))
    def delete(self, data: st.DataObject, share: int) -> None:
        """Any cleaner goes on, for some of its names: soon, late, or long after it was fenced."""
        self.go_on(data.draw(st.sampled_from(self.cleanings)), share)

    def go_on(self, cleaning: Cleaning, share: int) -> None:
        count = -(-len(cleaning.left) * share // 100)
        self.objects -= set(cleaning.left[:count])
        cleaning.left = cleaning.left[count:]
        if not cleaning.left:
            self.cleanings.remove(cleaning)

    @rule()
    def clean_by_the_driver_with_nothing_open(self) -> None:
        driver = self.drivers[-1]
        if driver.bases or driver.acked or driver.slot <= self.tip().sequence:
            return
        view = self.view_of_driver(driver)
        garbage = classify([info(name) for name in self.objects], view)
        self.objects -= {name for names in garbage.deletions() for name in names}
        named = set(view_of(self.live(), self.indexes, kinds={}).named)
        records = {record_name(m.sequence) for m in self.live()}
        claims = {record_name(s) for s, m in self.log.items() if m.kind == "claim"}
        for name in self.objects - named - records - claims:
            # Only what the running epoch itself may have left.
            assert name.startswith(f"data/{driver.generation:010d}/{driver.epoch:020d}/"), name

    # what must hold

    @invariant()
    def the_tip_s_epoch_and_the_one_before_can_be_restored(self) -> None:
        if not getattr(self, "log", None):
            return
        live = self.live()
        for one in live:
            assert record_name(one.sequence) in self.objects
        last = self.tip_epoch()
        for epoch in (last, last - 1):
            for sequence, part in self.needed(live, epoch):
                assert record_name(sequence) in self.objects
                assert part.object is None or part.object in self.objects
                if part.kind == "files":
                    for file in self.indexes[part.digest].files:
                        assert file.object in self.objects

    @invariant()
    def every_claim_is_there(self) -> None:
        for sequence, one in getattr(self, "log", {}).items():
            assert one.kind != "claim" or record_name(sequence) in self.objects

    @invariant()
    def a_record_that_is_there_names_only_what_is_there(self) -> None:
        if getattr(self, "stale_logs", False):
            return  # one may have come and died after the listing: its objects go before it
        for sequence, one in getattr(self, "log", {}).items():
            if record_name(sequence) not in self.objects:
                continue
            for part in one.slices:
                assert part.object is None or part.object in self.objects
                if part.kind == "files":
                    files = self.indexes[part.digest].files
                    assert all(file.object in self.objects for file in files)

    @invariant()
    def the_log_has_no_gap_but_among_claims(self) -> None:
        log = getattr(self, "log", {})
        there = sorted(
            sequence
            for name in getattr(self, "objects", ())
            if (sequence := parse_record_name(name)) is not None
        )
        checkpoints = [s for s in there if log[s].kind == "checkpoint"]
        if checkpoints:
            assert [s for s in there if s >= checkpoints[0]] == list(
                range(checkpoints[0], there[-1] + 1)
            )


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=100, stateful_step_count=20)
