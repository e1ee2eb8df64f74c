"""Rare branches: places of the protocol that a run must have come through.

They are told from outside, by what was noted: an error's code at a request, a task or a query, a
fault that struck, a decision that shows. Nothing in the product is marked for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.support.faults import Fault

__all__ = ["BRANCHES", "reached", "unreached"]

# name: the beginnings of notes that show it, any of them
BRANCHES: Mapping[str, tuple[str, ...]] = {
    # commits and fencing
    "a driver is fenced in its commit": ("query failed SB4001",),
    "a commit's outcome stays unknown": ("query failed SB4002",),
    "a create lands after its client gave up": ("late create: created",),
    "a create is delivered twice": ("late create: exists",),
    "a create finds its slot taken": ("create: exists",),
    "the answer to a request is lost": (Fault.ANSWER_LOST,),
    "the store is down for a while": (Fault.STORE_UNREACHABLE,),
    "two drivers run at once": (Fault.SECOND_DRIVER,),
    "a frozen driver thaws after its successor began": ("driver thawed as a zombie",),
    # batches
    "a batch is repeated from its offsets": ("batch repeated",),
    "a commit of Spark's is taken back": ("commits taken back",),
    "a plan of Spark's is taken back": ("offsets taken back",),
    "a plan or commit of Spark's is put back": ("offsets put back", "commits put back"),
    "a start is frozen while it goes back": (Fault.START_FROZEN,),
    "a batch is read in part": (Fault.READ_IN_PART,),
    "an epoch is found unfinished": ("query failed SB5001",),
    "the sink fails after the epoch was durable": (Fault.SINK_FAILED,),
    "two drivers meet in Spark's location": ("concurrent update of the location",),
    "a record supersedes another of its epoch": ("record supersedes",),
    # tasks
    "an input ends without its barrier": ("task failed: SB5003",),
    "the processor raises": ("task failed: SB1014",),
    "an ack comes too late": ("ack: SB5005",),
    "another action looks": (Fault.EVALUATED_AGAIN,),
    "a begin comes too late": ("begin: SB5005",),
    "a twin is started": (Fault.SPECULATIVE_TWIN,),
    "a stage is run again with other rows": (Fault.OTHER_ROWS,),
    "an output is lost and made again": (Fault.RESULT_LOST, Fault.STAGE_AGAIN),
    "a task's driver does not answer": ("rpc:",),
    "a session is not known any more": ("begin: SB5006", "ack: SB5006"),
    # local copies
    "a store is handed over at the door": ("store handed over",),
    "a store is asked for in vain": ("store asked for in vain",),
    "a store held too long gets a successor": ("reason: the local copy was held",),
    "a local store is damaged": ("reason: The local store",),
    "a local delta is damaged": ("reason: The delta", "reason: A local delta"),
    "a store half applied is seen": ("copy half applied",),
    "a copy is of another branch, or too far behind": (
        "reason: the local copy ",
        "reason: the local copy",
    ),
    "the disk is full": (Fault.DISK_FULL,),
    "a restore from local deltas alone": ("restored local",),
    "a restore from the durable copy": ("restored durable",),
    "a restore from a mixture": ("restored mixed",),
    "a restore with a layer on top": ("restored with a layer",),
    "a host is lost": (Fault.HOST_LOST,),
    # another parallelism
    "a query is started at another parallelism": (Fault.RESCALED,),
    "a child is made of several local parents": ("child from several local parents",),
    "a child is made of local and durable parents": ("child from parents: mixed",),
    "a child is made of durable parents alone": ("child from parents: durable",),
    "rescaled twice before a base": ("rescaled twice before a base",),
    "an epoch is repeated at another parallelism": ("record supersedes one of another",),
    "a child was left half made": ("child half made",),
    "what a clip cut off is freed": ("what was cut off is freed",),
    "a full level 0 is merged beside the rows": ("a full level 0 is merged",),
    "a base of a store in parts": ("base committed in parts",),
    # places and savepoints
    "all subtasks are placed anew in a batch": ("rebalanced in a batch",),
    "all subtasks are placed anew for an executor that came back": (
        "rebalanced: an executor came back",
    ),
    "a stranger takes a savepoint": ("savepoint taken by a stranger",),
    "a driver takes a savepoint": ("savepoint taken by the driver",),
    "a savepoint is cut": (Fault.SAVEPOINT_CUT,),
    "a savepoint is deleted": ("savepoint: deleted",),
    "what is left of a savepoint is deleted": ("savepoint: incomplete one deleted",),
    "a job begins with a savepoint": ("job begun with a savepoint",),
    "a job's beginning is cut, and tried again": ("job-begin cut",),
    # operator state
    "operator state goes with a record": ("operator state in a record",),
    "operator state has an object": ("operator state in an object",),
    "operator state that stays keeps its object": ("operator state keeps its object",),
    "operator state returns after its object was deleted": ("operator state returns",),
    "operator state is dealt out at another parallelism": ("operator state dealt out anew",),
    # time, and what a job begins with
    "timers fire on event time": ("timers fired in event time",),
    "timers fire on processing time": ("timers fired in processing time",),
    "rows come too late": ("late rows left out",),
    "expired state is removed": ("expired state removed",),
    "an initial state is taken in": ("initial state taken in",),
    "an initial state is taken in once more": ("initial state taken in again",),
    "a start without the initial state is refused": ("query failed SB1017",),
    # an unkind world
    "a wall clock steps": (Fault.CLOCK_JUMPED,),
    "a start is frozen in a call": ("frozen in a start", "frozen in a takeover"),
    "a cleaning is frozen in a call": ("frozen in a cleaning",),
    "the doing of a savepoint is frozen in a call": (
        "frozen in a savepoint",
        "frozen in a job-begin",
    ),
    "a frozen process thaws when others have gone on": ("thawed when others had gone on",),
    # several operators
    "a start finds one operator ahead of the other": ("claimed with the",),
    # refusals, and what they say that can be done
    "more batches are kept, as an error said": ("keeps more batches as an error said",),
    "files of the location come from a copy": ("files put back from a copy as an error said",),
    "a job is started anew when all is calm": ("started anew in the calm",),
    # bases and cleaning
    "a base of files is committed": ("base committed: files",),
    "a base of one object is committed": ("base committed: base apart",),
    "a base within a record": ("base committed: base inline",),
    "a file of the base before is named again": ("file named again",),
    "a grant lapses": ("base_done: SB5005", "base_renewed: SB5005"),
    "a driver cleans": ("driver cleaned",),
    "a stranger cleans": ("cleaned by a stranger",),
    "a deletion is done in part": (Fault.TORN_DELETE,),
    "an answer is damaged on its way": (Fault.READ_DAMAGED,),
}


def reached(counts: Mapping[str, int]) -> Counter[str]:
    """How often each branch was reached, by what was noted."""
    found: Counter[str] = Counter()
    for branch, beginnings in BRANCHES.items():
        found[branch] = sum(n for kind, n in counts.items() if kind.startswith(beginnings))
    return found


def unreached(counts: Mapping[str, int]) -> list[str]:
    """The branches that no note shows."""
    return [branch for branch, times in reached(counts).items() if not times]
