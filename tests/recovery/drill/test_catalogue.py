"""The catalogue of faults: every kind that is promised to be there is, and says what it does."""

from __future__ import annotations

import re

import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.stage import CannotStrikeError

# What drills must be able to do to a job, and the fault that does it.
WANTED = {
    "a worker killed": "worker-killed",
    "an executor killed": "executor-killed",
    "a host lost with its local directory": "host-lost",
    "the driver killed": "driver-killed",
    "an executor frozen and thawed": "executor-frozen",
    "speculative twins": "speculative-twin",
    "local copies deleted": "local-deleted",
    "local copies truncated": "local-truncated",
    "local copies with flipped bits": "local-flipped",
    "local copies from elsewhere": "local-foreign",
    "local copies read-only": "local-read-only",
    "the disk full": "disk-full",
    "the store slow": "store-slow",
    "the store throttling": "store-throttled",
    "the store down": "store-down",
    "the store losing answers": "answers-lost",
    "the store corrupting answers": "answers-corrupted",
    "credentials expiring": "credentials-expired",
    "the newest record damaged": "newest-record-damaged",
    "clock jumps": "clock-jumped",
    "two drivers at once": "two-drivers",
    "a crash in a commit": "crash-in-commit",
    "a crash in an upload": "crash-in-upload",
    "a crash in a clean-up": "crash-in-clean-up",
    "a crash in a rewind": "crash-in-rewind",
    "a failing fsync": "fsync-failing",
    "another parallelism": "rescaled",
    "a crash in the first epoch at another parallelism": "rescale-crashed",
    "subtasks placed anew by hand": "rebalanced",
    "a savepoint of a running job, and a clone of it": "savepoint-taken",
    "a crash in a savepoint": "savepoint-crashed",
}
FAULTS = list(ALL.values())


@pytest.mark.parametrize("wanted", WANTED)
def test_every_kind_of_fault_has_one_in_the_catalogue(wanted: str) -> None:
    assert WANTED[wanted] in ALL


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_says_in_a_sentence_what_happens_and_what_is_promised(fault: DrillFault) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", fault.name)
    for sentence in (fault.summary, fault.promise):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert sentence.count(". ") == 0
        assert "|" not in sentence  # it becomes a cell of a table


class _Bare:
    """A stage without any of what faults may need."""

    proxy = None
    shim = None
    store = None

    def __init__(self) -> None:
        self.hosts: list[object] = []


@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if "s3" in fault.needs or fault.name == "clock-jumped"],
    ids=lambda fault: fault.name,
)
def test_a_fault_that_cannot_be_made_says_so(fault: DrillFault) -> None:
    import random

    with pytest.raises(CannotStrikeError):
        fault.strike(_Bare(), random.Random(1))  # type: ignore[arg-type]
