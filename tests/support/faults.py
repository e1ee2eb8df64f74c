"""What can go wrong: one name for each kind of fault, wherever one is drawn, struck or counted.

The simulations note a fault under this name in the moment in which it strikes, the kills report it
under it, and `DRILLED` says which of them a drill's faults are. What follows from a fault (a task
that fails, a query that ends) has other names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

__all__ = ["DRILLED", "Fault", "struck"]


class Fault(StrEnum):
    """A kind of fault.

    Attributes:
        sentence: what happens.
    """

    sentence: str

    def __new__(cls, name: str, sentence: str) -> Fault:
        """By its name, with what happens."""
        made = str.__new__(cls, name)
        made._value_, made.sentence = name, sentence
        return made

    # processes
    WORKER_KILLED = "worker killed", "A process that runs tasks ends at once."
    WORKER_FROZEN = "worker frozen", "A process that runs tasks stands still, and goes on later."
    EXECUTOR_LOST = "executor lost", "An executor ends with all of its processes."
    EXECUTOR_FROZEN = "executor frozen", "An executor with its processes stands still for a while."
    HOST_LOST = "host lost", "A host's processes end, and its disk is gone."
    DRIVER_KILLED = "driver killed", "A driver ends at once."
    JVM_KILLED = "driver's JVM killed", "A driver's JVM ends at once, its Python process does not."
    DRIVER_FROZEN = "driver frozen", "A driver stands still, and goes on later."
    START_FROZEN = (
        "start frozen",
        "A driver stands still right before it changes a file of Spark's location.",
    )
    CALL_FROZEN = (
        "call frozen",
        "A process stands still right before a call of its start, cleaning or savepoint.",
    )
    SECOND_DRIVER = "second driver", "The job is started while a driver runs it."
    SLOT_FAILED = "slot failed", "A task of a continuous job fails, and with it the run."
    SLOT_CUT_OFF = "slot cut off", "A slot does not reach its driver for a while."
    POWER_CUT = "power cut", "All drivers end, and the last files of Spark's location are gone."
    QUERY_STOPPED = "query stopped", "A query is stopped in the middle of whatever it does."
    RESCALED = "started at another parallelism", "A start has another number of subtasks."
    REBALANCED = "rebalanced", "All subtasks are placed anew while the query runs."
    SUBTASK_MOVED = "subtask moved", "A subtask runs elsewhere than where its local copy is."
    # tasks and batches
    INPUT_TRUNCATED = "input truncated", "Upstream dies, which looks like the end of the input."
    PROCESSOR_RAISES = "processor raises", "The user's code raises."
    SINK_FAILED = "sink failed", "The sink fails once the epoch is durable."
    SPECULATIVE_TWIN = "speculative twin", "A second attempt runs beside one that takes long."
    STAGE_AGAIN = "stage run again", "Output is lost, and some subtasks are run again."
    OTHER_ROWS = "stage run again with other rows", "So are all of them, and upstream is not alike."
    READ_IN_PART = "batch read in part", "The sink takes some subtasks' output only."
    EVALUATED_AGAIN = (
        "evaluated again",
        "Another action evaluates a part of a batch that was evaluated.",
    )
    RESULT_LOST = "result lost", "A subtask's output is lost before anybody has fetched it."
    MESSAGE_LOST = "message lost", "A request of a task's to its driver, or the answer, is lost."
    MESSAGE_LATE = "message late", "A request of a task's to its driver is slow."
    MESSAGE_TWICE = "message twice", "A message between a task and its driver comes twice."
    # the store
    STORE_UNREACHABLE = "store unreachable", "The store answers nobody for a while."
    STORE_REFUSES = "store refuses", "The store refuses requests for a while: throttled, expired."
    STORE_SLOW = "store slow", "Requests to the store take longer."
    REQUEST_LOST = "request lost", "A request to the store is lost, and not carried out."
    ANSWER_LOST = "answer lost", "A request to the store is carried out, and its answer is lost."
    LATE_WRITE = "late write", "A request is carried out after its client has given up, or died."
    WRITTEN_TWICE = "written twice", "A request to the store is carried out twice."
    TORN_DELETE = "torn delete", "A deletion of many objects is carried out in part."
    READ_DAMAGED = "read damaged", "An answer has other bytes than the object."
    OBJECT_DAMAGED = "object damaged", "An object has other bytes than were written."
    LISTING_LATE = "listing late", "A listing shows what lay in the store a while ago."
    STRANGER_CLEANS = "a stranger cleans", "Somebody outside the job removes what nobody needs."
    SAVEPOINT_FROZEN = "savepoint frozen", "Whoever makes a savepoint stands still for a while."
    SAVEPOINT_CUT = "savepoint cut", "Whoever makes a savepoint, or begins with one, ends at once."
    # disks and clocks
    LOCAL_FILE_GONE = "local file gone", "A file of a local copy, or all of one, is gone."
    LOCAL_FILE_DAMAGED = "local file damaged", "A file of a local copy is cut, or is another's."
    DISK_FULL = "disk full", "A local disk takes nothing more."
    DISK_FAILS = "disk fails", "A local disk is read-only, or cannot be synced."
    CLOCK_STEPPED = "clock stepped back", "The driver's wall clock says an earlier time."
    CLOCK_JUMPED = (
        "clock jumped",
        "The wall clock of a host, a driver or the store steps either way, by up to hours.",
    )


# The faults of `recovery.drill.catalogue`, by their names there.
DRILLED: Final[Mapping[str, tuple[Fault, ...]]] = {
    "worker-killed": (Fault.WORKER_KILLED,),
    "worker-frozen": (Fault.WORKER_FROZEN,),
    "executor-killed": (Fault.EXECUTOR_LOST,),
    "executor-frozen": (Fault.EXECUTOR_FROZEN,),
    "host-lost": (Fault.HOST_LOST,),
    "driver-killed": (Fault.DRIVER_KILLED,),
    "speculative-twin": (Fault.WORKER_FROZEN, Fault.SPECULATIVE_TWIN),
    "two-drivers": (Fault.SECOND_DRIVER,),
    "local-deleted": (Fault.LOCAL_FILE_GONE,),
    "local-truncated": (Fault.LOCAL_FILE_DAMAGED,),
    "local-flipped": (Fault.LOCAL_FILE_DAMAGED,),
    "local-foreign": (Fault.LOCAL_FILE_DAMAGED,),
    "local-read-only": (Fault.DISK_FAILS,),
    "disk-full": (Fault.DISK_FULL,),
    "fsync-failing": (Fault.DISK_FAILS,),
    "store-down": (Fault.STORE_UNREACHABLE,),
    "store-slow": (Fault.STORE_SLOW,),
    "store-throttled": (Fault.STORE_REFUSES,),
    "answers-lost": (Fault.ANSWER_LOST,),
    "answers-corrupted": (Fault.READ_DAMAGED,),
    "credentials-expired": (Fault.STORE_REFUSES,),
    "newest-record-damaged": (Fault.OBJECT_DAMAGED,),
    "store-folder-failing": (Fault.STORE_REFUSES,),
    "clock-jumped": (Fault.CLOCK_STEPPED,),
    "crash-in-commit": (Fault.DRIVER_KILLED, Fault.LATE_WRITE),
    "crash-in-upload": (Fault.EXECUTOR_LOST,),
    "crash-in-clean-up": (Fault.DRIVER_KILLED, Fault.TORN_DELETE),
    "crash-in-rewind": (Fault.DRIVER_KILLED,),
    "rescaled": (Fault.DRIVER_KILLED, Fault.RESCALED),
    "rescale-crashed": (Fault.DRIVER_KILLED, Fault.RESCALED),
    "rebalanced": (Fault.EXECUTOR_LOST, Fault.REBALANCED),
    "savepoint-taken": (),
    "savepoint-crashed": (Fault.DRIVER_KILLED, Fault.SAVEPOINT_CUT),
}


def struck(counts: Mapping[str, int]) -> Counter[Fault]:
    """How often each fault struck, by what was noted."""
    return Counter({fault: counts[fault] for fault in Fault if counts.get(fault)})
