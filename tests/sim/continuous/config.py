"""What one seed's continuous job is like: its settings, and which faults befall it, and how often.

As in `tests.sim.config`: each kind of fault is left out of about half of all seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tests.sim.config import Config
from tests.support.faults import Fault

__all__ = ["STRIKES", "JobConfig", "draw", "draw_parts"]


@dataclass
class JobConfig(Config):
    """One world. What a job of micro-batches has besides is not used.

    Attributes:
        splits: of the data. rate: rows of each, and rule_rate: rules, in a second.
        contents: that the rules take; few, so that each of them comes back.
        interval_s: between checkpoints. alignment_timeout_s: None: no barrier overtakes rows.
        concurrent: checkpoints under way at once, at most.
        slot_killed_every_s, slot_cut_every_s, slot_frozen_every_s: a slot ends, does not reach its
            driver, or stands still, and goes on when others have taken its place.
        clock_stepped_every_s: a process's wall clock says an earlier or a later time from then on.
        orphans: how often the slots of a driver that is killed live on.
        timed: rows have event times, and set timers; hold_ms: from a row to its timer.
        beside: a job of micro-batches runs on the same hosts and in the same bucket.
        chained: a second keyed operator has the output of the first, by another key.
        asked_every_s: a user has a checkpoint taken, and waits for it, for a while.
        found_later: splits are found one after the other, and looked for ever after.
    """

    splits: int = 3
    rate: float = 12.0
    rule_rate: float = 0.7
    contents: int = 3
    interval_s: float = 0.5
    alignment_timeout_s: float | None = None
    silence_s: float = 2.0
    concurrent: int = 1
    slot_killed_every_s: float = 0.0
    slot_frozen_every_s: float = 0.0
    clock_stepped_every_s: float = 0.0
    slot_cut_every_s: float = 0.0
    orphans: float = 0.5
    timed: bool = False
    hold_ms: int = 300
    chained: bool = False
    beside: bool = False
    asked_every_s: float = 0.0
    found_later: bool = False

    def calm_down(self) -> None:
        """Nothing goes wrong any more."""
        for name in STRIKES:
            setattr(self, name, 0.0)
        self.savepoint_every_s = self.asked_every_s = 0.0


_RATES = (
    ("store_faults", 0.002, 0.04),
    ("torn_delete", 0.02, 0.3),
    ("hop_faults", 0.002, 0.03),
    ("sink_fails", 0.005, 0.1),
)
_TIMES = (
    ("slot_killed_every_s", 3.0, 20.0),
    ("slot_cut_every_s", 3.0, 20.0),
    ("slot_frozen_every_s", 2.0, 20.0),
    ("clock_stepped_every_s", 1.0, 10.0),
    ("driver_killed_every_s", 4.0, 30.0),
    ("driver_frozen_every_s", 4.0, 30.0),
    ("host_lost_every_s", 5.0, 40.0),
    ("outage_every_s", 5.0, 40.0),
    ("query_stopped_every_s", 4.0, 30.0),
    ("outside_clean_every_s", 2.0, 20.0),
)

# Which faults a rate is of.
STRIKES: Mapping[str, tuple[Fault, ...]] = {
    "store_faults": (
        Fault.REQUEST_LOST,
        Fault.ANSWER_LOST,
        Fault.LATE_WRITE,
        Fault.WRITTEN_TWICE,
    ),
    "torn_delete": (Fault.TORN_DELETE,),
    "hop_faults": (Fault.MESSAGE_LOST, Fault.MESSAGE_LATE),
    "sink_fails": (Fault.SINK_FAILED,),
    "slot_killed_every_s": (Fault.WORKER_KILLED,),
    "slot_cut_every_s": (Fault.SLOT_CUT_OFF,),
    "slot_frozen_every_s": (Fault.WORKER_FROZEN,),
    "clock_stepped_every_s": (Fault.CLOCK_STEPPED,),
    "driver_killed_every_s": (Fault.DRIVER_KILLED,),
    "driver_frozen_every_s": (Fault.DRIVER_FROZEN, Fault.SECOND_DRIVER),
    "host_lost_every_s": (Fault.HOST_LOST,),
    "outage_every_s": (Fault.STORE_UNREACHABLE,),
    "query_stopped_every_s": (Fault.QUERY_STOPPED,),
    "outside_clean_every_s": (Fault.STRANGER_CLEANS,),
    "rescale": (Fault.RESCALED,),
}


def draw(random: Random) -> JobConfig:
    """A world of its own for each seed."""
    config = JobConfig()
    config.parallelism = random.choice([1, 2, 2, 3])
    config.hosts = random.choice([1, 2])
    config.keys = random.choice([2, 5])
    config.rate = random.choice([2.0, 6.0, 15.0])
    config.rule_rate = random.choice([0.3, 0.7, 1.5])
    config.contents = random.choice([2, 3])
    config.interval_s = random.choice([0.2, 0.5, 1.0])
    config.arrow = True
    config.retain_epochs = random.choice([1, 1, 2])
    config.clean_every_epochs = random.choice([1, 1, 2])
    config.inline_budget_bytes = random.choice([0, 100, 1 << 20])
    config.base_every_epochs = random.choice([1, 3, 5])
    config.apart_every_epochs = random.choice([1, 2, 4])
    config.whole_limit_bytes = random.choice([0, 1 << 20])
    config.large_bytes = random.choice([0, 0, 1 << 30])
    config.unflushed_epochs = random.choice([1, 4])
    for name, low, high in _RATES:
        if random.random() < 0.5:
            setattr(config, name, low * (high / low) ** random.random())
    for name, low, high in _TIMES:
        if random.random() < 0.4:
            setattr(config, name, low * (high / low) ** random.random())
    if random.random() < 0.5:
        config.rescale = random.choice([0.3, 0.8])
    elif random.random() < 0.3:  # rows in flight come back at the same parallelism only
        config.alignment_timeout_s = random.choice([0.0, 0.1])
    if config.alignment_timeout_s is None:  # these two do not go together
        config.concurrent = random.choice([1, 1, 2, 3])
    return config


def draw_parts(config: JobConfig, seed: int) -> JobConfig:
    """What the job has besides: each part by chance of its own, so that the others stay."""
    random = Random(f"timers {seed}")
    config.timed = random.random() < 0.5
    config.hold_ms = random.choice([50, 300, 2_000])
    config.chained = Random(f"chained {seed}").random() < 0.4
    random = Random(f"savepoints {seed}")
    if random.random() < 0.35:
        config.savepoint_every_s = random.choice([0.7, 2.0, 5.0])
    config.beside = Random(f"beside {seed}").random() < 0.25
    random = Random(f"asked {seed}")
    if random.random() < 0.4:
        config.asked_every_s = random.choice([2.0, 6.0])
    # Rows of a split that is found late are late: with event time some of them would not count.
    config.found_later = random.random() < 0.5 and not config.timed
    return config
