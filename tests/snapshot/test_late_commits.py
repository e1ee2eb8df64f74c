"""Commits over S3 that land late, twice, or after their driver slept through a takeover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recovery.drill import Fault, FaultProxy, Rule, Script, Verb
from snapshot.formats.record import Record, record_name
from snapshot.retention.deletable import view_of
from snapshot.retention.garbage_collection import clean
from snapshot.storage import ObjectStore, StoreOptions, open_store
from statebackend.errors import CommitUnknownError, FencedError
from tests.snapshot.logs import new_id
from tests.snapshot.logs_on_s3 import *  # noqa: F403
from tests.snapshot.logs_on_s3 import checkpoint, log_on, raw_records
from tests.support.s3 import S3

pytestmark = pytest.mark.full  # waits for answers that come late

# --- answers of which only the head arrives ------------------------------------------------------


@pytest.mark.parametrize("fixed_length", [False, True])
def test_a_listing_that_lost_its_body_is_not_taken_for_an_empty_log(
    ministack: S3, proxy: FaultProxy, fixed_length: bool
) -> None:
    uri = ministack.fresh_uri()
    log = log_on(impatient(ministack, proxy, uri, deadline_s=10.0), "a")
    log.claim()
    proxy.reset()
    lost = Fault.truncate(0.0, fixed_length=fixed_length)
    proxy.plan = Script(Rule(fault=lost, verbs={Verb.LIST}, nth={1}))
    assert [m.writer for m in log.manifests()] == ["a"]


# --- writes that land late -----------------------------------------------------------------------


def impatient(server: S3, proxy: FaultProxy, uri: str, *, deadline_s: float = 0.2) -> ObjectStore:
    """A store behind the proxy that does not wait long: for what is held, or tried again."""
    options = StoreOptions(
        endpoint_url=proxy.url,
        region="us-east-1",
        ca_bundle=str(server.certificates.ca_bundle),
        deadline_s=deadline_s,
        read_timeout_s=1.0,
    )
    return open_store(uri, new_id=new_id, options=options)


def hold_next_commit() -> Script:
    return Script(Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/"))


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_commit_that_lands_after_its_driver_gave_up_is_seen_or_shut_out(
    ministack: S3, proxy: FaultProxy, lands_first: bool
) -> None:
    uri = ministack.fresh_uri()
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    old_log = log_on(impatient(ministack, proxy, uri), "old")
    new_log = log_on(straight, "new")
    old = log_on(straight, "old").claim()
    proxy.plan = hold_next_commit()
    with pytest.raises(CommitUnknownError):
        old_log.append(old, checkpoint(0, b"late"), [b"late"])
    assert proxy.wait_held(timeout_s=10)

    if lands_first:
        proxy.release()
        assert proxy.wait_idle(timeout_s=10)
    new = new_log.claim()
    if not lands_first:
        proxy.release()
        assert proxy.wait_idle(timeout_s=10)
    new_log.append(new, checkpoint(0, b"after"), [b"after"])
    with pytest.raises(CommitUnknownError):  # in doubt for ever, whatever became of it
        old_log.append(old, checkpoint(1, b""), [b""])
    kinds = [(record.manifest.kind, record.manifest.writer) for record in in_order(ministack, uri)]
    late = [("checkpoint", "old")] if lands_first else []
    assert kinds == [("claim", "old"), *late, ("claim", "new"), ("checkpoint", "new")]


def in_order(server: S3, uri: str) -> list[Record]:
    return [record for _, (_, record) in sorted(raw_records(server, uri).items())]


def test_a_commit_tried_again_while_its_first_try_is_still_under_way_counts_once(
    ministack: S3, proxy: FaultProxy
) -> None:
    uri = ministack.fresh_uri()
    log = log_on(impatient(ministack, proxy, uri), "a", tries=5)
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    tenure = log_on(straight, "a").claim()
    proxy.plan = Script(
        Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/", nth=range(1, 2))
    )
    assert log.append(tenure, checkpoint(0, b"body"), [b"body"]) == 1
    assert log.append(tenure, checkpoint(1, b"next"), [b"next"]) == 2
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert log.append(tenure, checkpoint(2, b"last"), [b"last"]) == 3
    assert [record.manifest.epoch for record in in_order(ministack, uri)] == [-1, 0, 1, 2]


def test_a_late_twin_of_a_record_that_retention_deleted_changes_nothing_that_counts(
    ministack: S3, proxy: FaultProxy
) -> None:
    uri = ministack.fresh_uri()
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    log = log_on(straight, "a")
    tenure = log.claim()
    proxy.plan = Script(Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/", nth={1}))
    hasty = log_on(impatient(ministack, proxy, uri), "a", tries=5)
    first = hasty.append(tenure, checkpoint(0, b""), [b""])
    tip = log.append(tenure, checkpoint(1, b"", oldest_needed=2), [b""])
    straight.delete([record_name(first)])
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert sorted(raw_records(ministack, uri)) == [0, first, tip]  # the twin is back

    assert [m.sequence for m in log.manifests()] == [tip]
    # A cleaning that takes all below the tip for cleaned, and knows of no kinds, finds it.
    view = replace(view_of(log.manifests(), {}, kinds={}), cleaned_below=tip)
    report = clean(straight, lambda: view)
    assert report.removed["records"].objects == 1
    assert sorted(raw_records(ministack, uri)) == [0, tip]
    assert log.append(tenure, checkpoint(2, b"", oldest_needed=2), [b""]) == tip + 1
    successor = log_on(straight, "b").claim()
    assert (successor.sequence, successor.generation) == (tip + 2, 2)
    with pytest.raises(FencedError):
        log.append(tenure, checkpoint(3, b"", oldest_needed=2), [b""])


# --- sleepers ------------------------------------------------------------------------------------


def test_a_driver_that_slept_through_a_takeover_and_a_cleaning_is_fenced(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    store = open_store(uri, new_id=new_id, options=ministack.options())
    sleeper_log, log = log_on(store, "sleeper"), log_on(store, "awake")
    sleeper = sleeper_log.claim()
    tenure = log.claim()
    for epoch in range(50):
        oldest_needed = max(tenure.oldest_needed, tenure.next_sequence - 3)
        log.append(tenure, checkpoint(epoch, b"", oldest_needed), [b""])
    records = raw_records(ministack, uri)
    gone = [
        record_name(number)
        for number, (_, record) in records.items()
        if record.manifest.kind != "claim" and number < tenure.oldest_needed
    ]
    store.delete(gone)
    left = raw_records(ministack, uri)
    assert len(gone) > 40
    with pytest.raises(FencedError, match="awake"):
        sleeper_log.append(sleeper, checkpoint(0, b""), [b""])
    assert {number: data for number, (data, _) in raw_records(ministack, uri).items()} == {
        number: data for number, (data, _) in left.items()
    }
    assert log.append(tenure, checkpoint(50, b"", tenure.oldest_needed), [b""]) == 52


def test_two_sleepers_in_a_row_are_both_fenced_and_the_third_goes_on(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    store = open_store(uri, new_id=new_id, options=ministack.options())
    logs = [log_on(store, name) for name in ("first", "second", "third")]
    tenures = [log.claim() for log in logs]
    for log, tenure in zip(logs[:2], tenures[:2], strict=True):
        with pytest.raises(FencedError):
            log.append(tenure, checkpoint(0, b""), [b""])
    assert logs[2].append(tenures[2], checkpoint(0, b"x"), [b"x"]) == 3
    assert [m.writer for m in logs[2].manifests()] == ["first", "second", "third", "third"]
