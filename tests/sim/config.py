"""What one seed's world is like: sizes, policies, and which faults it has, and how many.

Swarm: each kind of fault is left out of about half of all seeds, and where it is in, its rate is
drawn too. A world with everything at once hides as much as one without faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random

from tests.support.faults import Fault

__all__ = ["ALWAYS", "IN_SOME_PLANTED_WORLDS", "STRIKES", "Config", "calm", "draw"]


@dataclass
class Config:
    """One world. Rates are per occasion, ``*_every_s`` mean times between two of them (0: never).

    Attributes:
        parallelism: subtasks, at first; ``rescale``: how often another one is chosen at a start.
        hosts, workers: executors, and Python workers in each.
        rows: of a batch, at most. keys: a third of all that there are.
        small_bytes: what is smaller is copied into another's store when a child is made.
        asynchronous, checked: how the query commits; the one is refused without the other.
        arrow: deltas in their real format; else in a quicker one, under the same digests.
        indeterminate: an upstream stage that is run again gives other rows.
        zombies: a second driver may start while the first still runs.
        batches_kept: Spark removes what is older once it has planned a batch; see
            spark.sql.streaming.minBatchesToRetain.
        takes_way_out: whoever starts the job does what an error says that can be done; in the
            calm at the end everybody does.
        keyless: the operator has lists and a map that belong to no key.
        second: there is a second operator, "beside" the first or "chained" to it.
        timed: the operator has timers on "event" or "processing" time, and state that expires.
        initial: it begins with an initial state, which now and then a start does not give.
    """

    parallelism: int = 3
    hosts: int = 2
    workers: int = 2
    rows: int = 40
    keys: int = 8
    arrow: bool = False
    asynchronous: bool = False
    checked: bool = True
    indeterminate: bool = False
    zombies: bool = False
    batches_kept: int = 10
    takes_way_out: bool = False
    keyless: bool = False
    second: str = ""
    timed: str = ""
    initial: bool = False
    retain_epochs: int = 1
    clean_every_epochs: int = 1
    clean_min_age_s: float = 0.0
    inline_budget_bytes: int = 1 << 20
    base_every_epochs: int = 5
    apart_every_epochs: int = 4
    whole_limit_bytes: int = 0
    base_lease_s: float = 2.0
    unflushed_epochs: int = 4
    open_stores: int = 32
    lease_timeout_s: float = 0.1
    commit_timeout_s: float = 3.0
    small_bytes: int = 0
    large_bytes: int = 0  # what a store says that it holds, at least: bases apart
    # the network, the stores
    store_s: float = 0.008
    store_timeout_s: float = 0.4
    store_faults: float = 0.0
    torn_delete: float = 0.0
    flipped_read: float = 0.0
    flipped_base: float = 0.0
    outage_every_s: float = 0.0
    hop_s: float = 0.001
    hop_timeout_s: float = 2.0
    hop_faults: float = 0.0
    # tasks
    row_s: float = 0.002
    truncated: float = 0.0
    processor_fails: float = 0.0
    twins: float = 0.0
    reruns: float = 0.0
    partial: float = 0.0
    looks: float = 0.0  # after the batch was evaluated, another action looks at a part of it
    joined: float = 0.0  # the batch's output with itself: two tasks for each subtask, side by side
    lost_results: float = 0.0
    sink_fails: float = 0.0
    # processes and disks
    worker_killed_every_s: float = 0.0
    executor_killed_every_s: float = 0.0
    host_lost_every_s: float = 0.0
    worker_frozen_every_s: float = 0.0
    driver_killed_every_s: float = 0.0
    driver_frozen_every_s: float = 0.0
    query_stopped_every_s: float = 0.0
    rescale: float = 0.0
    power_cut_every_s: float = 0.0  # only where no second driver is
    second_driver_every_s: float = 0.0
    outside_clean_every_s: float = 0.0
    local_damage_every_s: float = 0.0
    rebalance_every_s: float = 0.0
    savepoint_every_s: float = 0.0
    erase_every_s: float = 0.0  # drawn by nobody: see tests.sim.test_erasing
    start_frozen: float = 0.0
    clock_jumps_every_s: float = 0.0
    calls_frozen: float = 0.0
    listing_lag_s: float = 0.0  # at most
    moved: float = 0.0
    disk_full: float = 0.0
    spontaneous_flush: float = 0.02
    same_worker: float = 0.8

    def faultless(self) -> Config:
        """The same world with nothing going wrong any more."""
        quiet = Config(**{f.name: getattr(self, f.name) for f in fields(self)})
        for name, _, _ in (*_RATES, *_TIMES, *_LATER, *_UNKIND):
            setattr(quiet, name, 0.0)
        quiet.listing_lag_s = quiet.rescale = quiet.flipped_base = quiet.power_cut_every_s = 0.0
        quiet.erase_every_s = 0.0
        return quiet


# name, and the bounds of its rate where it is in
_RATES = (
    ("store_faults", 0.002, 0.06),
    ("torn_delete", 0.02, 0.3),
    ("flipped_read", 0.001, 0.02),
    ("hop_faults", 0.002, 0.05),
    ("truncated", 0.01, 0.1),
    ("processor_fails", 0.002, 0.05),
    ("twins", 0.02, 0.3),
    ("reruns", 0.02, 0.2),
    ("partial", 0.02, 0.1),
    ("lost_results", 0.005, 0.08),
    ("sink_fails", 0.005, 0.05),
    ("moved", 0.01, 0.2),
    ("disk_full", 0.005, 0.1),
)
_TIMES = (
    ("outage_every_s", 5.0, 60.0),
    ("worker_killed_every_s", 0.5, 10.0),
    ("executor_killed_every_s", 2.0, 20.0),
    ("host_lost_every_s", 3.0, 40.0),
    ("worker_frozen_every_s", 0.5, 10.0),
    ("driver_killed_every_s", 2.0, 20.0),
    ("driver_frozen_every_s", 2.0, 20.0),
    ("query_stopped_every_s", 3.0, 30.0),
    ("second_driver_every_s", 3.0, 20.0),
    ("outside_clean_every_s", 2.0, 20.0),
    ("local_damage_every_s", 1.0, 10.0),
)
# Drawn after all the others, which stay what they were; and such that the fixed portion of the
# tests, where some rare branches are reached by one seed alone, still reaches all.
_APART = 42
_WHOLE_JOBS = 2
_BY_TIME = 2
_LATER = (
    ("rebalance_every_s", 0.3, 10.0),
    ("savepoint_every_s", 0.3, 4.0),
    ("looks", 0.02, 0.3),
    ("start_frozen", 0.1, 0.8),
)
# Drawn after these, for the same reasons.
_UNKIND_APART = 362
_UNKIND_SHARE = 0.15
_UNKIND = (
    ("clock_jumps_every_s", 0.1, 5.0),
    ("calls_frozen", 0.05, 0.8),
)

# Drawn after these, for the same reasons.
_LATE_APART = 18
_LATE_SHARE = 0.08

# Which faults a rate is of.
STRIKES: Mapping[str, tuple[Fault, ...]] = {
    "store_faults": (
        Fault.REQUEST_LOST,
        Fault.ANSWER_LOST,
        Fault.LATE_WRITE,
        Fault.WRITTEN_TWICE,
    ),
    "torn_delete": (Fault.TORN_DELETE,),
    "flipped_read": (Fault.READ_DAMAGED,),
    "flipped_base": (Fault.READ_DAMAGED,),
    "hop_faults": (Fault.MESSAGE_LOST, Fault.MESSAGE_LATE),
    "truncated": (Fault.INPUT_TRUNCATED,),
    "processor_fails": (Fault.PROCESSOR_RAISES,),
    "twins": (Fault.SPECULATIVE_TWIN,),
    "reruns": (Fault.STAGE_AGAIN, Fault.OTHER_ROWS),
    "partial": (Fault.READ_IN_PART,),
    "lost_results": (Fault.RESULT_LOST,),
    "sink_fails": (Fault.SINK_FAILED,),
    "moved": (Fault.SUBTASK_MOVED,),
    "disk_full": (Fault.DISK_FULL,),
    "outage_every_s": (Fault.STORE_UNREACHABLE,),
    "worker_killed_every_s": (Fault.WORKER_KILLED,),
    "executor_killed_every_s": (Fault.EXECUTOR_LOST,),
    "host_lost_every_s": (Fault.HOST_LOST,),
    "worker_frozen_every_s": (Fault.WORKER_FROZEN,),
    "driver_killed_every_s": (Fault.DRIVER_KILLED,),
    "driver_frozen_every_s": (Fault.DRIVER_FROZEN,),
    "query_stopped_every_s": (Fault.QUERY_STOPPED,),
    "second_driver_every_s": (Fault.SECOND_DRIVER,),
    "outside_clean_every_s": (Fault.STRANGER_CLEANS,),
    "local_damage_every_s": (Fault.LOCAL_FILE_GONE, Fault.LOCAL_FILE_DAMAGED),
    "rebalance_every_s": (Fault.REBALANCED,),
    "savepoint_every_s": (Fault.SAVEPOINT_FROZEN, Fault.SAVEPOINT_CUT),
    "looks": (Fault.EVALUATED_AGAIN,),
    "start_frozen": (Fault.START_FROZEN,),
    "clock_jumps_every_s": (Fault.CLOCK_JUMPED,),
    "calls_frozen": (Fault.CALL_FROZEN,),
    "rescale": (Fault.RESCALED,),
    "listing_lag_s": (Fault.LISTING_LATE,),
}
IN_SOME_PLANTED_WORLDS: Mapping[str, tuple[Fault, ...]] = {
    "power_cut_every_s": (Fault.POWER_CUT,),
}
ALWAYS = (Fault.CLOCK_STEPPED,)  # in each world


def draw(random: Random) -> Config:
    """A world of its own for each seed."""
    config = Config()
    config.parallelism = random.choice([1, 2, 3, 3, 4])
    config.hosts = random.choice([1, 2, 2, 3])
    config.workers = random.choice([1, 2, 2, 3])
    config.rows = random.choice([20, 80, 160, 240])
    config.row_s = random.choice([0.0005, 0.002, 0.01])
    config.same_worker = random.choice([0.0, 0.5, 0.9, 1.0])
    config.keys = random.choice([3, 8, 20])
    config.arrow = random.random() < 0.03
    config.asynchronous = random.random() < 0.5
    config.checked = random.random() < 0.5
    config.retain_epochs = random.choice([1, 1, 2, 4])
    config.clean_every_epochs = random.choice([0, 1, 1, 1, 3])
    config.clean_min_age_s = random.choice([0.0, 0.0, 0.0, 1.0])
    config.inline_budget_bytes = random.choice([0, 100, 1 << 20, 1 << 20])
    config.base_every_epochs = random.choice([1, 3, 5, 12])
    config.apart_every_epochs = random.choice([2, 4, 9])
    config.whole_limit_bytes = random.choice([0, 1 << 20])
    config.large_bytes = random.choice([0, 0, 1 << 30])
    config.base_lease_s = random.choice([0.3, 2.0, 20.0])
    config.unflushed_epochs = random.choice([1, 4, 16])
    config.open_stores = random.choice([0, 1, 32, 32])
    config.lease_timeout_s = random.choice([0.02, 0.1, 0.5])
    config.commit_timeout_s = random.choice([0.0, 3.0, 20.0])
    for name, low, high in _RATES:
        if random.random() < 0.5:
            setattr(config, name, low * (high / low) ** random.random())
    for name, low, high in _TIMES:
        if random.random() < 0.35:
            setattr(config, name, low * (high / low) ** random.random())
    kind = random.random()
    if kind < 0.35:
        config.indeterminate = True  # two drivers at once are exact where batches are determinate
        config.second_driver_every_s = config.partial = 0.0
    elif kind < 0.7:
        config.zombies = True
        config.reruns *= 0.5
    else:
        config.second_driver_every_s = 0.0
    if random.random() < 0.5:
        config.rescale = 0.1 * 9 ** random.random()
        if not config.driver_killed_every_s and not config.query_stopped_every_s:
            config.query_stopped_every_s = 2.0 * 10 ** random.random()
    if random.random() < 0.3:
        config.flipped_base = 0.001 * 300 ** random.random()
    config.small_bytes = random.choice([0, 60, 1 << 20])
    apart = Random(random.getrandbits(32) + _APART)
    for name, low, high in _LATER:
        if apart.random() < 0.25:
            setattr(config, name, low * (high / low) ** apart.random())
    unkind = Random(apart.getrandbits(32) + _UNKIND_APART)
    if config.zombies and apart.random() < 0.25:
        # Each alone comes often enough, all three of them by chance in one world of thirty.
        config.asynchronous = True
        config.second_driver_every_s = 3.0 * (20.0 / 3.0) ** apart.random()
        config.partial = 0.02 * 5.0 ** apart.random()
    whole_jobs(config, Random(random.getrandbits(32) + _WHOLE_JOBS))
    _draw_unkind(config, unkind)
    late = Random(unkind.getrandbits(32) + _LATE_APART)
    if late.random() < _LATE_SHARE:
        config.listing_lag_s = 0.05 * 40.0 ** late.random()
    _by_time(config, Random(random.getrandbits(32) + _BY_TIME))
    return config


def whole_jobs(config: Config, random: Random) -> None:
    """What the query is made of, in some worlds; drawn apart, so that the rest stays."""
    config.keyless = random.random() < 0.2
    if random.random() < 0.2:
        config.second = random.choice(["beside", "chained"])
        config.partial = 0.0  # a part of the one's output would be the other's input


def _by_time(config: Config, random: Random) -> None:
    """What goes by time, and what the job begins with, in some worlds."""
    if random.random() < 0.16:
        config.timed = random.choice(["event", "processing"])
    config.initial = random.random() < 0.16


def _draw_unkind(config: Config, random: Random) -> None:
    for name, low, high in _UNKIND:
        if random.random() < _UNKIND_SHARE:
            setattr(config, name, low * (high / low) ** random.random())
    if random.random() < _UNKIND_SHARE:
        config.batches_kept = random.choice([1, 1, 2, 3])
        config.takes_way_out = random.random() < 0.7  # else in the calm alone


def calm() -> Config:
    """A small world without faults."""
    return Config(worker_killed_every_s=0.0)
