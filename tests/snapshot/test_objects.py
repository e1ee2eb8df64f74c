"""Which objects a snapshot may name: a record must never name one that cleaning may delete."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from blake3 import blake3

from snapshot.formats.object_names import base_file_name, data_name
from snapshot.protocol.base_leases import Grant
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.messages import AckRequest, BaseDone, BeginRequest, SlicePart
from statebackend.errors import ForeignObjectError, StaleRequestError
from statebackend.runtime.worker.background_upload import Uploaded
from tests.recovery.driver import Run, ack_of, done_of, part_of

KINDS = ["delta", "base", "operator_state", "broadcast"]
OTHERS = [
    data_name(1, 1, "of the epoch before"),
    data_name(1, 3, "of a later epoch"),
    data_name(2, 2, "of another driver"),
    base_file_name(1, "grant", "file"),
    "data/as-the-first-release-named-them",
    "data/0000000001/2/not-a-name",
    "elsewhere",
]


def named(name: str, content: bytes = b"x") -> SlicePart:
    return SlicePart(digest=blake3(content).hexdigest(), size_bytes=9, rows=1, name=name)


def ack_with(run: Run, epoch: int, **parts: SlicePart) -> AckRequest:
    before = run.begin(epoch).chain
    ack = ack_of(before, parts.pop("delta", part_of({})), epoch)
    digest = parts["broadcast"].digest if "broadcast" in parts else ""
    return msgspec.structs.replace(ack, broadcast_digest=digest, **parts)


def finish(run: Run, epoch: int, **parts: SlicePart) -> None:
    assert run.coordinator.ack(ack_with(run, epoch, **parts)) is Acked.COMPLETE
    assert run.commit() is not None


def at_epoch_two(**parts: SlicePart) -> Run:
    run = Run(1)
    finish(run, 0)
    finish(run, 1, **parts)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_made_for_the_epoch_is_taken(kind: str) -> None:
    finish(at_epoch_two(), 2, **{kind: named(data_name(1, 2, "made"))})


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_made_for_it_is_refused_and_another_attempt_is_taken(
    kind: str, name: str
) -> None:
    run = at_epoch_two()
    with pytest.raises(ForeignObjectError, match=r"'op', subtask 0, for epoch 2") as caught:
        run.coordinator.ack(ack_with(run, 2, **{kind: named(name)}))
    assert repr(name) in str(caught.value)
    assert name not in run.coordinator.run.pending_names()
    assert run.coordinator.records.take_due("op", 2) is None
    finish(run, 2, **{kind: named(data_name(1, 2, "made"))})


@pytest.mark.parametrize("kind", ["operator_state", "broadcast"])
def test_what_the_epoch_began_with_keeps_its_object(kind: str) -> None:
    before = named(data_name(1, 1, "before"))
    run = at_epoch_two(**{kind: before})
    finish(run, 2, **{kind: before})
    finish(run, 3, **{kind: before})
    again = run.again()  # the same, read from its record
    finish(again, 4, **{kind: before})


@pytest.mark.parametrize("kind", ["operator_state", "broadcast"])
def test_what_an_earlier_epoch_had_is_refused_once_another_was_between(kind: str) -> None:
    """Its content has come back; its object may be deleted by now."""
    first = named(data_name(1, 1, "first"), b"first")
    run = at_epoch_two(**{kind: first})
    finish(run, 2, **{kind: named(data_name(1, 2, "second"), b"second")})
    with pytest.raises(ForeignObjectError, match="first"):
        run.coordinator.ack(ack_with(run, 3, **{kind: first}))
    finish(run, 3, **{kind: named(data_name(1, 3, "made anew"), b"first")})


@pytest.mark.parametrize("kind", ["delta", "base"])
def test_no_delta_or_base_is_one_that_was_there_before(kind: str) -> None:
    list_of_before = named(data_name(1, 1, "list"))
    run = at_epoch_two(operator_state=list_of_before)
    with pytest.raises(ForeignObjectError):
        run.coordinator.ack(ack_with(run, 2, **{kind: list_of_before}))


# --- bases that were uploaded apart ---------------------------------------------------------------


def granted(run: Run) -> Grant:
    run.begin(2)
    lineage = run.lineage().subtasks[0]
    grant = run.coordinator.run.operator("op").bases.grant(
        0, 1, lineage.chain_at(1) or "", cast("BeginRequest", object())
    )
    assert grant is not None
    return grant


def done(grant: Grant, part: SlicePart) -> BaseDone:
    uploaded = Uploaded(kind="files", part=part, state_bytes=1, uploaded_bytes=1, seconds=0.0)
    return done_of(grant, uploaded)


def test_a_base_names_its_own_files_and_those_that_came_with_its_grant() -> None:
    run = at_epoch_two()
    grant = granted(run)
    before = base_file_name(1, "before", "1.sst")
    grant.given = frozenset([before])
    own = base_file_name(1, grant.id, "2.sst")
    index = named(base_file_name(1, grant.id, "index"))
    run.coordinator.uploads.done(done(grant, index), [before, own])
    assert index.name in run.coordinator.run.pending_names()


@pytest.mark.parametrize(
    "name",
    [
        base_file_name(1, "lapsed", "1.sst"),
        base_file_name(2, "grant", "1.sst"),
        data_name(1, 1, "list"),
        "elsewhere",
    ],
)
@pytest.mark.parametrize("is_index", [False, True])
def test_a_base_with_another_file_is_refused_and_its_grant_goes_on(
    name: str, is_index: bool
) -> None:
    run = at_epoch_two()
    grant = granted(run)
    own = base_file_name(1, grant.id, "1.sst")
    part = named(name if is_index else own)
    with pytest.raises(ForeignObjectError, match=name):
        run.coordinator.uploads.done(done(grant, part), [own] if is_index else [own, name])
    run.coordinator.uploads.done(done(grant, named(own)), [])


def test_what_came_with_a_grant_that_lapsed_is_refused() -> None:
    run = at_epoch_two()
    grant = granted(run)
    run.coordinator.uploads.withdraw("op", grant)
    with pytest.raises(StaleRequestError):
        run.coordinator.uploads.done(done(grant, named("")), [])
