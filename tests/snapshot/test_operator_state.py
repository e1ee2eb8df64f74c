"""What an operator's state begins with, and what is deleted from it."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot.formats.object_names import data_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.initial_state_checks import check_initial, lacks_initial, takes_initial
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import SlicePart
from snapshot.protocol.operators import operators_setting
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import FencedError, ProtocolError
from tests.recovery.driver import Run, new_id, spec_of

EPOCH = 5  # the first that the operator ever runs


def part(subtask: int, generation: int = 1) -> SlicePart:
    name = data_name(generation, EPOCH, f"initial{subtask}")
    return SlicePart(digest=f"{subtask:064x}", size_bytes=10, rows=1, name=name)


def given(*subtasks: int) -> dict[str, dict[str, Any]]:
    return {"op": {"initial": {subtask: part(subtask) for subtask in subtasks}}}


def dropped(*ids: int) -> dict[str, dict[str, Any]]:
    return {"op": {"dropped": {f"s\0{one}": one for one in ids}}}


def names_of(run: Run) -> set[str]:
    return {name for name in run.coordinator.run.pending_names() if "initial" in name}


# --- initial state -------------------------------------------------------------------------------


def test_each_subtask_is_handed_its_own_initial_state_in_the_operators_first_epoch() -> None:
    run = Run(3, specs=given(0, 2))
    assert [run.begin(EPOCH, n).initial for n in range(3)] == [part(0), None, part(2)]


def test_a_retry_in_the_first_epoch_is_handed_it_again() -> None:
    run = Run(1, specs=given(0))
    run.finish(EPOCH)
    assert run.begin(EPOCH, attempt=1).initial == part(0)


def test_it_is_handed_out_in_no_later_epoch() -> None:
    run = Run(1, specs=given(0))
    run.finish(EPOCH)
    assert run.begin(EPOCH + 1).initial is None
    # Nor in a later run, even if its driver made it in vain.
    assert run.again().begin(EPOCH + 1).initial is None


def test_a_first_epoch_that_is_repeated_after_a_restart_is_handed_it_again() -> None:
    run = Run({"op": 1, "b": 1}, specs=given(0))
    run.finish(EPOCH, ["op"])  # and b did not finish it
    for later in (run.again(), run.again(first_epoch=EPOCH)):
        assert later.begin(EPOCH).initial == part(0)


def test_only_the_operator_that_is_new_is_handed_it() -> None:
    run = Run({"a": 1})
    run.finish(EPOCH - 1)
    specs = {uid: {"initial": {0: part(0)}} for uid in ("a", "op")}
    later = run.again({"a": 1, "op": 1}, specs=specs)
    assert later.begin(EPOCH, 0, "a").initial is None
    assert later.begin(EPOCH, 0, "op").initial == part(0)


def test_a_driver_knows_by_the_log_whether_the_initial_state_is_needed() -> None:
    run = Run(1)
    assert takes_initial(None, EPOCH)
    run.finish(EPOCH)
    lineage = resolve(run.records)["op"]
    assert takes_initial(lineage, EPOCH)
    assert not takes_initial(lineage, EPOCH + 1)


def test_claims_tell_who_may_not_repeat_a_first_epoch_without_it() -> None:
    log = CommitLog(MemoryStore(), job="clicks", writer="w", new_id=new_id)

    def lacks(first_epoch: int, **has: bool) -> list[str]:
        return lacks_initial(log.manifests(), has, first_epoch)

    assert lacks(EPOCH, op=False) == []
    log.claim(settings=operators_setting({"a": 0, "op": EPOCH}, ["op"]))
    log.claim()  # of a start that goes back
    assert lacks(EPOCH, a=False, op=False) == ["op"]
    assert lacks(EPOCH, a=False, op=True) == []
    assert lacks(EPOCH - 1, op=False) == ["op"]
    assert lacks(EPOCH + 1, op=False) == []
    log.claim(settings=operators_setting({"a": 0}))
    assert lacks(EPOCH, op=False) == ["op"], "another run had it not"
    log.claim(settings=operators_setting({"a": 0, "op": EPOCH}))
    assert lacks(EPOCH, op=False) == ["op"], "only a start after that epoch could do without it"
    log.claim(settings=operators_setting({"a": 0, "op": EPOCH + 3}))
    assert lacks(EPOCH + 3, op=False) == [], "it is a new operator, which began with nothing"


def test_the_record_of_a_first_epoch_tells_it_too_where_its_claim_is_needed_no_more() -> None:
    run = Run(1, specs=given(0))
    run.finish(EPOCH)
    records = [one for one in run.records if one.kind == "checkpoint"]
    assert records
    assert lacks_initial(records, {"op": False}, EPOCH) == ["op"]
    assert lacks_initial(records, {"op": True}, EPOCH) == []
    assert lacks_initial(records, {"op": False}, EPOCH + 1) == []


def test_its_objects_are_kept_from_cleaning_until_the_first_epoch_is_confirmed() -> None:
    run = Run(2, specs=given(0, 1))
    run.begin(EPOCH)
    kept = {part(0).name, part(1).name}
    assert names_of(run) == kept
    run.finish(EPOCH)
    assert names_of(run) == kept  # a retry may still ask
    run.begin(EPOCH + 1)
    assert names_of(run) == set()


def test_with_asynchronous_commits_they_are_kept_until_the_first_record_is_durable() -> None:
    run = Run(1, specs=given(0), asynchronous=True)
    run.begin(EPOCH)
    run.ack(EPOCH)
    work = run.coordinator.records.take_due("op", EPOCH)
    assert work is not None
    run.begin(EPOCH + 1)
    assert names_of(run) == {part(0).name}
    run.coordinator.records.committed(work, run.append(work))
    assert names_of(run) == set()


def test_what_was_given_in_vain_is_not_kept() -> None:
    run = Run(1, specs=given(0))
    run.finish(EPOCH)
    later = run.again()
    later.begin(EPOCH + 1)
    assert names_of(later) == set()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (part(0, generation=2).name, FencedError),
        ("data/elsewhere", ProtocolError),
        ("", ProtocolError),
    ],
)
def test_initial_state_that_cleaning_would_take_for_garbage_is_refused(
    name: str, error: type[Exception]
) -> None:
    lost = SlicePart(digest="00" * 32, size_bytes=1, rows=1, name=name)
    spec = spec_of("op", 1, more={"initial": {0: lost}})
    with pytest.raises(error, match="initial state of operator 'op'"):
        check_initial([spec], 1)
    check_initial([spec_of("op", 1, more=given(0)["op"])], 1)


# --- states that are deleted ---------------------------------------------------------------------


def test_a_dropped_state_is_deleted_in_the_first_epoch_of_the_run_and_never_after() -> None:
    run = Run(2)
    run.finish(0)
    later = run.again(specs=dropped(3, 1))
    assert [later.begin(1, n).dropped for n in (0, 1)] == [(1, 3), (1, 3)]
    later.finish(1)
    assert later.records[-1].dropped_ids == [1, 3]
    assert later.begin(2).dropped == ()
    later.finish(2)
    assert later.records[-1].dropped_ids == [1, 3]
    assert later.again().begin(3).dropped == ()


def test_a_retry_deletes_it_again() -> None:
    run = Run(2, specs=dropped(1))
    run.finish(0)
    assert run.begin(0, 0, attempt=1).dropped == (1,)


@pytest.mark.parametrize("still_dropped", [True, False])
def test_a_repeated_epoch_deletes_it_again_also_if_the_code_no_longer_does(
    *, still_dropped: bool
) -> None:
    run = Run({"op": 1, "b": 1})
    run.finish(0)
    later = run.again(specs=dropped(1))
    later.finish(1, ["op"])  # and b did not finish it
    again = later.again(specs=dropped(1) if still_dropped else {})
    assert again.begin(1).dropped == (1,)
    again.finish(1)
    assert again.records[-1].dropped_ids == []  # of b
    assert again.begin(2).dropped == ()
    assert again.again().begin(2).dropped == ()


def test_what_no_record_says_was_deleted_is_deleted_by_the_next_run() -> None:
    run = Run(2)
    run.finish(0)
    later = run.again(specs=dropped(1))
    later.begin(1, 0)
    later.ack(1, 0)
    assert later.again().begin(1, 0).dropped == (1,)


def test_a_state_that_is_dropped_later_is_deleted_then() -> None:
    run = Run(1, specs=dropped(1))
    run.finish(0)
    later = run.again(specs=dropped(1, 2))
    assert later.begin(1).dropped == (2,)
    later.finish(1)
    assert later.records[-1].dropped_ids == [1, 2]


def test_a_rewind_with_asynchronous_commits_deletes_it_again() -> None:
    run = Run(1, asynchronous=True)
    run.finish(0)
    later = run.again(specs=dropped(1))
    later.begin(1)
    later.ack(1)
    assert later.coordinator.records.take_due("op", 1) is not None
    assert later.begin(2).dropped == ()  # the layer of epoch 1 has it
    assert later.again().begin(1).dropped == (1,)
