"""What one seed simulates: a dataflow, its input, what goes wrong; and what must come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from snapshot.barriers.alignment import Mode
from tests.support.faults import Fault

__all__ = [
    "ALWAYS",
    "BROADCAST",
    "FORWARD",
    "KEY",
    "REBALANCE",
    "STRIKES",
    "Config",
    "Edge",
    "Vertex",
    "draw",
    "mix",
]

KEY, FORWARD, BROADCAST, REBALANCE = "key", "forward", "broadcast", "rebalance"
SPLIT = 1_000  # a row's number within its split is below it
_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """64 bits of any number: sums of them tell multisets of rows apart (splitmix64)."""
    z = (number ^ (number >> 64)) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def final_row(vertex: int, key: int, count: int, total: int) -> int:
    """The row that an operator emits for a key at the end of its input: it says its state."""
    return (1 << 100) + (vertex << 92) + (key << 80) + (count << 64) + (total & _MASK)


@dataclass(frozen=True)
class Vertex:
    """``kind``: source, keyed or sink. ``splits``: a source's, as number -> rows."""

    number: int
    kind: str
    splits: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}{self.number}"


@dataclass(frozen=True)
class Edge:
    number: int
    sender: int
    receiver: int
    how: str


@dataclass
class Config:
    """Rates are by step."""

    vertices: list[Vertex] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    parallelism: list[int] = field(default_factory=list)
    keys: int = 4
    mode: Mode = "exactly_once"
    alignment_timeout_ms: int | None = None
    capacity: int = 3
    slow: float = 0.0  # share of the channels
    interval_s: float = 0.05
    min_pause_s: float = 0.0
    max_concurrent: int = 1
    max_share: float | None = None
    timeout_s: float = 0.5
    tolerable: int = 2
    hooks_late: float = 0.1
    idle: float = 0.0
    savepoints: float = 0.0005
    may_leave: bool = False  # subtasks at their end, before the job is over
    stops: float = 0.0  # the job, with a savepoint
    fails: float = 0.001  # a task
    driver_dies: float = 0.0004
    persist_fails: float = 0.02
    write_fails: float = 0.05
    write_s: float = 0.004  # a record, at most
    messages_lost: float = 0.0
    patient: bool = True  # a run is hit only once it has a checkpoint
    rescale: float = 0.3
    steps: int = 1_500


# Which faults a rate is of.
STRIKES: Mapping[str, tuple[Fault, ...]] = {
    "fails": (Fault.SLOT_FAILED,),
    "driver_dies": (Fault.DRIVER_KILLED, Fault.LATE_WRITE),
    "persist_fails": (Fault.REQUEST_LOST,),
    "write_fails": (Fault.REQUEST_LOST,),
    "messages_lost": (Fault.MESSAGE_LOST,),
    "stops": (Fault.QUERY_STOPPED,),
    "rescale": (Fault.RESCALED,),
}
ALWAYS = (Fault.MESSAGE_TWICE,)  # in each world


def draw(random: Random) -> Config:
    """A world of its own for every seed."""
    config = Config()
    _graph(config, random)
    config.keys = random.randint(1, 5)
    config.mode = "at_least_once" if random.random() < 0.15 else "exactly_once"
    if random.random() < 0.6:
        config.alignment_timeout_ms = random.choice([0, 1, 3, 10])
    config.capacity = random.randint(1, 5)
    config.slow = random.choice([0.0, 0.2, 0.5])
    config.interval_s = random.choice([0.01, 0.03, 0.1])
    config.min_pause_s = random.choice([0.0, 0.0, 0.02])
    config.max_concurrent = random.choice([1, 1, 2, 3])
    config.max_share = random.choice([None, None, 0.5])
    config.timeout_s = random.choice([0.05, 0.2, 1.0])
    config.tolerable = random.choice([0, 2, 5])
    config.hooks_late = random.choice([0.0, 0.1, 0.5])
    config.idle = random.choice([0.0, 0.0, 0.02])
    config.patient = random.random() < 0.8
    config.fails = random.choice([0.0, 0.002, 0.006])
    config.driver_dies = random.choice([0.0, 0.001, 0.004])
    config.persist_fails = random.choice([0.0, 0.02, 0.1])
    config.write_fails = random.choice([0.0, 0.05, 0.2])
    config.messages_lost = random.choice([0.0, 0.0, 0.1])
    config.rescale = random.choice([0.0, 0.5])
    config.savepoints = random.choice([0.0, 0.0, 0.02])
    config.may_leave = random.random() < 0.5
    config.stops = random.choice([0.0, 0.0, 0.01])
    config.steps = random.randint(500, 3_000)
    return config


def _graph(config: Config, random: Random) -> None:
    """One or two sources, one to three operators, a sink or two; perhaps a broadcast."""
    sources = random.randint(1, 2)
    operators = random.randint(1, 3)
    sinks = random.randint(1, 2)
    split = 0
    for number in range(sources):
        splits = {}
        for _ in range(random.randint(1, 3)):
            splits[split] = random.choice([0, 3, random.randint(4, 40)])
            split += 1
        config.vertices.append(Vertex(number, "source", splits))
    kinds = ["keyed"] * operators + ["sink"] * sinks
    config.vertices += [Vertex(sources + n, kind) for n, kind in enumerate(kinds)]
    config.parallelism = [random.randint(1, 3) for _ in config.vertices]
    used: set[int] = set()
    for vertex in config.vertices[sources:]:
        above = [v.number for v in config.vertices[: vertex.number] if v.kind != "sink"]
        wanted = {random.choice(above), above[-1]} if random.random() < 0.4 else {above[-1]}
        if vertex.kind == "keyed" and vertex.number == sources:
            wanted = {random.choice(range(sources))}
        for sender in sorted(wanted):
            _edge(config, sender, vertex, random)
            used.add(sender)
    first = config.vertices[sources]
    for number in set(range(sources)) - used:  # a second source: another input, or rules for all
        _edge(config, number, first, random, BROADCAST if random.random() < 0.5 else "")


def _edge(config: Config, sender: int, vertex: Vertex, random: Random, how: str = "") -> None:
    if not how and vertex.kind == "keyed":
        how = KEY
    if not how:
        same = config.parallelism[sender] == config.parallelism[vertex.number]
        how = FORWARD if same and random.random() < 0.5 else REBALANCE
    config.edges.append(Edge(len(config.edges), sender, vertex.number, how))


def key_of(row: int, keys: int) -> int:
    """The key of a source's row, or of an operator's last one for a key."""
    return row >> 80 & 0xFFF if row >> 100 else row % keys


def truth(config: Config) -> dict[int, Counter[int]]:
    """What every vertex must give in all, by its number: for a sink, what is committed."""
    gives: dict[int, Counter[int]] = {}
    for vertex in config.vertices:
        rows: Counter[int] = Counter()
        for split, size in vertex.splits.items():
            rows.update(range(split * SPLIT, split * SPLIT + size))
        for edge in config.edges:
            if edge.receiver == vertex.number and edge.how != BROADCAST:
                rows += gives[edge.sender]
        if vertex.kind == "keyed":
            counts: Counter[int] = Counter()
            totals: Counter[int] = Counter()
            for row, times in rows.items():
                key = key_of(row, config.keys)
                counts[key] += times
                totals[key] += times * mix(row)
            rows.update(final_row(vertex.number, k, n, totals[k]) for k, n in counts.items())
        gives[vertex.number] = rows
    return gives
