"""What may be deleted, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshot.formats.file_index import FileEntry, FileIndex
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.formats.record import record_name
from snapshot.retention.deletable import Fate, RecordKind, View, classify, view_of
from statebackend.errors import SettingError
from tests.snapshot.retained import entry, info, manifest

INDEX = FileIndex(
    incarnation="i",
    files=[FileEntry(name="1.sst", object=base_file_name(1, "old", "1"), size_bytes=1, digest="")],
)
LIVE = [
    manifest(5, slices=[entry(3, object=data_name(1, 3, "named"))], oldest_needed=0),
    manifest(
        6,
        "checkpoint",
        generation=2,
        oldest_needed=5,
        slices=[entry(4, "files", object=base_file_name(2, "g", "index"), digest="index")],
    ),
]
VIEW = view_of(
    LIVE,
    {"index": INDEX},
    kinds={0: "claim", 1: "checkpoint"},
    own_generation=2,
    confirmed_epoch=4,
    open_grants={"open"},
    pending={data_name(2, 1, "pending"), base_file_name(2, "closed", "pending")},
)
OUTSIDE = replace(VIEW, own_generation=None, confirmed_epoch=None, open_grants=frozenset())


def fate(name: str, view: View = VIEW) -> Fate:
    (item,) = classify([info(name, 0)], view).items
    return item.fate


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (0, Fate.LIVE),  # a claim
        (1, Fate.DEAD),
        (2, Fate.UNKNOWN),
        (5, Fate.LIVE),
        (6, Fate.LIVE),
        (7, Fate.LIVE),  # made since the view was taken
    ],
)
def test_only_checkpoints_below_the_oldest_needed_are_dead(sequence: int, expected: Fate) -> None:
    assert fate(record_name(sequence)) is expected
    assert fate(record_name(sequence), OUTSIDE) is expected


@pytest.mark.parametrize(
    ("name", "driver", "outsider"),
    [
        (data_name(1, 3, "named"), Fate.LIVE, Fate.LIVE),
        (data_name(1, 9, "stray"), Fate.DEAD, Fate.DEAD),
        ("data/0123", Fate.DEAD, Fate.DEAD),
        (data_name(2, 3, "stray"), Fate.DEAD, Fate.DRIVERS),
        (data_name(2, 1, "pending"), Fate.DRIVERS, Fate.DRIVERS),
        (data_name(2, 4, "running"), Fate.DRIVERS, Fate.DRIVERS),
        (data_name(3, 0, "later"), Fate.DRIVERS, Fate.DRIVERS),
        ("data/1/2", Fate.FOREIGN, Fate.FOREIGN),
        (base_file_name(1, "old", "1"), Fate.LIVE, Fate.LIVE),
        (base_file_name(2, "g", "index"), Fate.LIVE, Fate.LIVE),
        (base_file_name(1, "old", "2"), Fate.DEAD, Fate.DEAD),
        (base_file_name(2, "open", "1"), Fate.DRIVERS, Fate.DRIVERS),
        (base_file_name(2, "closed", "pending"), Fate.DRIVERS, Fate.DRIVERS),
        (base_file_name(2, "closed", "1"), Fate.DEAD, Fate.DRIVERS),
        (base_file_name(3, "later", "1"), Fate.DRIVERS, Fate.DRIVERS),
        ("base/readme", Fate.FOREIGN, Fate.FOREIGN),
        ("probe/1", Fate.DEAD, Fate.DEAD),
        ("probe/1/2", Fate.FOREIGN, Fate.FOREIGN),
        ("log/readme", Fate.FOREIGN, Fate.FOREIGN),
        ("savepoint/1", Fate.FOREIGN, Fate.FOREIGN),
    ],
)
def test_an_object_nobody_names_is_dead_if_nobody_ever_will(
    name: str, driver: Fate, outsider: Fate
) -> None:
    assert fate(name) is driver
    assert fate(name, OUTSIDE) is outsider


def test_a_driver_that_was_fenced_is_an_outsider() -> None:
    fenced = replace(VIEW, own_generation=1)
    assert fate(data_name(2, 3, "stray"), fenced) is Fate.DRIVERS
    assert fate(base_file_name(2, "closed", "1"), fenced) is Fate.DRIVERS


def test_an_index_that_does_not_read_keeps_the_files_of_all_bases() -> None:
    view = view_of(LIVE, {"index": None}, kinds={})
    assert fate(base_file_name(1, "old", "2"), view) is Fate.LIVE
    assert fate(data_name(1, 9, "stray"), view) is Fate.DEAD


def test_nothing_is_decided_without_every_live_record_and_index() -> None:
    for missing in ([], LIVE[1:], [*LIVE[:1], manifest(7, oldest_needed=5)]):
        with pytest.raises(SettingError):
            view_of(missing, {"index": INDEX}, kinds={})
    with pytest.raises(SettingError):
        view_of(LIVE, {}, kinds={})


def test_age_is_counted_by_the_store_s_clock() -> None:
    listing = [
        info(record_name(1), 1_000),
        info(data_name(1, 9, "old"), 4_000),
        info(data_name(1, 9, "young"), 4_001),
        info(data_name(1, 9, "unknown"), None),
        info(record_name(6), 10_000),
        info("probe/old", 1_000),
        info("probe/young", 9_000),
        info("probe/unknown", None),
    ]
    garbage = classify(listing, VIEW, min_age_ms=6_000)
    assert [i.name for i in garbage.of(Fate.DEAD)] == [
        data_name(1, 9, "old"),
        data_name(1, 9, "unknown"),
        record_name(1),
        "probe/old",
    ]
    assert [i.name for i in garbage.of(Fate.YOUNG)] == [
        data_name(1, 9, "young"),
        "probe/unknown",
        "probe/young",
    ]


def test_the_log_is_said_to_be_clean_up_to_what_stays() -> None:
    names = [record_name(s) for s in (0, 1, 2, 3, 5, 6)]
    kinds: dict[int, RecordKind] = {0: "claim", 1: "checkpoint", 2: "claim", 3: "checkpoint"}
    view = replace(VIEW, kinds=kinds)
    assert classify([info(n) for n in names], view).cleaned_below() == 5
    unread = replace(VIEW, kinds={s: k for s, k in kinds.items() if s != 2})
    assert classify([info(n) for n in names], unread).cleaned_below() == 2
    young = classify([info(n, 0) for n in names], view, min_age_ms=1)
    assert young.cleaned_below() == 1


def test_records_go_first_and_from_the_oldest() -> None:
    kinds: dict[int, RecordKind] = dict.fromkeys(range(5), "checkpoint")
    listing = [info(record_name(s)) for s in (4, 2, 3)] + [info("data/b"), info("data/a")]
    assert classify(listing, replace(VIEW, kinds=kinds)).deletions() == [
        [record_name(s) for s in (2, 3, 4)],
        ["data/a", "data/b"],
    ]
