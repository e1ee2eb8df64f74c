"""Draws the figures of README and docs from bench/results: `python -m bench.pages`.

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`. A claim has one current figure:
that of the newest run at full size on a quiet machine. Each block ends with its command, its
machine and its files. tests/tidy/test_figures.py holds that the pages are current.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = ("README.md", "docs/quality/performance.md", "docs/howto/continuous.md")
QUIET = 0.15
_BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


class Run(NamedTuple):
    """One file of bench/results."""

    file: str
    machine: dict[str, Any]
    sizes: dict[str, Any]
    data: dict[str, Any]

    @property
    def quiet(self) -> bool:
        return float(self.machine.get("busy_share_at_start", 1.0)) <= QUIET


def runs(folder: Path = RESULTS) -> list[Run]:
    """All runs at full size, the oldest first."""
    found = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        sizes = data.get("sizes", {})
        if sizes.get("name", "full") == "full":
            found.append(Run(path.name, data["machine"], sizes, data))
    return sorted(found, key=lambda run: (run.machine["time_utc"], run.file))


def newest(benchmark: str, good: Callable[[Run], bool] = lambda run: run.quiet) -> Run:
    """The newest run of a benchmark that is good enough."""
    return [run for run in runs() if benchmark in run.data and good(run)][-1]


def best(benchmark: str) -> Run:
    """The newest quiet run; if there is none, the newest."""
    found = [run for run in runs() if benchmark in run.data]
    return ([run for run in found if run.quiet] or found)[-1]


def source(command: str, used: Iterable[Run]) -> str:
    """What a block ends with: how to measure it again, and where it was measured."""
    files = {run.file: run for run in used}
    machines = sorted({_machine(run) for run in files.values()})
    names = ", ".join(f"`{name}`" for name in sorted(files))
    return f"`{command}`. {'; '.join(machines)}. From `bench/results`: {names}."


def _machine(run: Run) -> str:
    machine = run.machine
    cpu = re.sub(r"\(R\)| Processor", "", machine["cpu"])
    memory = round(machine["memory_bytes"] / 2**30)
    spark, day = machine["packages"]["pyspark"], machine["time_utc"][:10]
    busy = "" if run.quiet else ", busy with other things"
    return f"{cpu}, {machine['cores']} cores, {memory} GiB, Spark {spark}, {day}{busy}"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# What is measured, the benchmark's name for it, and what tells its run from others of that name.
THROUGHPUT = (
    ("a counter: one value a key, 100,000 keys", "counter", None, "file"),
    ("the same in pandas", "pandas", None, "file"),
    ("an event-time timer for each row", "timers", None, "file"),
    ("maps of 100 entries, 100,000 keys; a row reads and writes one entry", "map", 100_000, "file"),
    ("the same, our store on S3", "map", 100_000, "s3"),
    ("the same maps, 10,000 keys, ten rows a key", "map", 10_000, "file"),
)


def throughput() -> str:
    """Unmodified processors through Spark's operator and through this."""
    rows, used = [], []
    for what, work, map_keys, store in THROUGHPUT:

        def good(run: Run, work: str = work, keys: int | None = map_keys, at: str = store) -> bool:
            found = run.data["throughput"]
            same = keys is None or run.sizes.get("map_keys") == keys
            return run.quiet and work in found["works"] and found["store"] == at and same

        run = newest("throughput", good)
        used.append(run)
        one = run.data["throughput"]["works"][work]["configurations"][0]["rounds"][-1]
        spark, ours = one["spark"]["rows_per_s"], one["ours"]["rows_per_s"]
        rows.append((what, f"{spark:,.0f}", f"{ours:,.0f}", f"{ours / spark:.1f}"))
    head = "rows per second | Spark's operator, RocksDB with changelog | this | times"
    command = (
        "tox -e bench -- throughput --work counter pandas map timers --rounds 1 --partitions 2"
    )
    return table(head, rows) + "\n\n" + source(command, used)


def aggregate() -> str:
    """Counts by key: Spark's own in the JVM, Flink, and this."""
    rows, used = [], []
    for what, work in (("100,000 keys", "count"), ("1,000,000 keys", "count-1m")):

        def good(run: Run, work: str = work) -> bool:
            return run.quiet and work in run.data["aggregate"]["works"]

        sides: dict[str, float] = {}
        chosen = newest("aggregate", good)
        one = chosen.data["aggregate"]["works"][work]["configurations"][0]["rounds"][-1]["runs"]
        sides = {side: found["rows_per_s"] for side, found in one.items()}
        used.append(chosen)
        ours, spark, flink = sides["ours"], sides["spark"], sides.get("flink")
        told = (f"{flink:,.0f}", f"{ours / flink:.1f}") if flink else ("not in this run", "")
        rows.append((what, f"{ours:,.0f}", f"{spark:,.0f}", f"{ours / spark:.1f}", *told))
    head = "rows per second | this | Spark, in the JVM | times | Flink 2.3 | times"
    command = "tox -e bench -- aggregate --partitions 2 --rounds 1"
    return table(head, rows) + "\n\n" + source(command, used)


def growth() -> str:
    """The same count over ever more keys."""
    run = newest("growth")
    points = run.data["growth"]["points"]
    rows = [(f"{one['keys']:,}", f"{one['runs']['ours']['rows_per_s']:,.0f}") for one in points]
    return table("keys | rows per second", rows) + "\n\n" + source("tox -e bench -- growth", [run])


def continuous() -> str:
    """A count by key without micro-batches: rows per second, and latency."""
    both = newest("continuous", lambda run: run.quiet and "flink" in _most(run))
    last = newest("continuous")
    used = [both, last]
    ours, flink = (_most(both)[side]["rows_per_s"] for side in ("ours", "flink"))
    rows = [("as fast as rows are taken", f"{ours:,.0f}", f"{flink:,.0f}", f"{ours / flink:.1f}")]
    most = table("rows per second | this | Flink 2.3 | times", rows)
    lines = []
    for run in (last, both):
        for one in run.data["continuous"]["rounds"][-1]["half"]:
            half = "Flink's" if run is both and one["rate"] < ours / 4 else "this library's"
            if run is last or half == "Flink's":
                side = "this" if one["side"] == "ours" else "Flink 2.3"
                p50, p99 = f"{one['p50_ms']:.0f} ms", f"{one['p99_ms']:.0f} ms"
                at = f"{one['rate']:,} rows/s (half of {half} maximum in that run)"
                lines.append((at, side, one["wait"], p50, p99))
    latency = table("load | | a row waits for others at most | p50 | p99", lines)
    return f"{most}\n\n{latency}\n\n" + source("tox -e bench -- continuous --rounds 1", used)


def _most(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.data["continuous"]["rounds"][-1]["most"]
    return found


def skew() -> str:
    """Checkpoints while one channel is two seconds behind."""
    run = newest("skew")
    rows = []
    for one in run.data["skew"]["runs"]:
        took = sorted(point["took_ms"] for point in one["checkpoints"])
        kept = max(point["inflight_bytes"] for point in one["checkpoints"])
        limit = one["alignment_timeout_s"]
        median = took[len(took) // 2]
        rows.append((limit or "none", f"{median:,.0f} ms", f"{took[-1]:,.0f} ms", f"{kept:,}"))
    head = "`alignment_timeout_s` | median | longest | bytes of rows in the checkpoint, at most"
    return table(head, rows) + "\n\n" + source("tox -e bench -- skew", [run])


def kafka() -> str:
    """From a topic to a topic: every side at least once, and those that can exactly once."""
    from bench.kafka.kafka_names import NAMES, medians

    run = newest("kafka", lambda run: True)
    found = run.data["kafka"]
    sizes, texts = found["sizes"], []
    for name, what in (("at-least-once", "at least once"), ("exactly-once", "exactly once")):
        rows = []
        for side in found["rounds"][0][name]:
            values = medians(found["rounds"], name, side)
            delays = [_or_failed(values[of], ",.0f", " ms") for of in ("p50_ms", "p99_ms")]
            most = _or_failed(values["rows_per_s"], ",.0f", "")
            parts = [f"{of} {version}" for of, version in found["versions"].get(side, {}).items()]
            last = found["rounds"][-1][name][side]
            busy = " and ".join(f"{last[of]['busy_before']:.0%}" for of in ("rate", "most"))
            rows.append((NAMES[side], *delays, most, busy, ", ".join(parts)))
        head = f"{what} | p50 at {sizes['rate']:,} rows/s | p99 | rows/s at most"
        head += " | other load on the machine, before each of the two | versions"
        texts.append(table(head, rows))
    command = f"tox -e bench -- kafka --rounds {len(found['rounds'])} --rate {sizes['rate']}"
    broker = f"Kafka {found['versions']['broker']['kafka']}. "
    return "\n\n".join([*texts, broker + source(command, [run])])


def _or_failed(value: float | None, form: str, unit: str) -> str:
    return "failed" if value is None else f"{value:{form}}{unit}"


def recovery() -> str:
    """A new driver and a new worker on a host that has the files."""
    run = newest("recovery")
    rows = [
        (
            one["epochs"],
            f"{one['begin_to_first_row_ms']:.1f} ms",
            f"{one['longest_ms']:.1f} ms",
            one["reads_from_begin_on"],
            one["reads_at_driver_start"],
        )
        for one in run.data["recovery"]["cases"]
    ]
    head = (
        "epochs before | to the first row, median | longest | reads of the store by the worker | "
        "reads of the store by the driver, at its start"
    )
    size = f"One subtask with {run.data['recovery']['state_bytes'] / 1e9:.2f} GB of files.\n\n"
    return size + table(head, rows) + "\n\n" + source("tox -e bench -- recovery", [run])


def rescale() -> str:
    """Two subtasks out of one, and one out of two, where the files are."""
    run = newest("rescale", lambda run: True)
    found = run.data["rescale"]
    halves, joined = found["1 -> 2"], found["2 -> 1"]
    rows = [
        ("1 subtask becomes 2, the first", f"{halves['low']['usable']:.2f} s"),
        ("1 subtask becomes 2, the second", f"{halves['high']['usable']:.2f} s"),
        ("2 subtasks become 1", f"{joined['local']['usable']:.2f} s"),
        ("to compare: copying the smaller half", f"{joined['copying']:.1f} s"),
    ]
    size = f"{found['keys']:,} keys, {found['parent_bytes'] / 1e9:.2f} GB of files.\n\n"
    text = size + table("until the first key is read | ", rows)
    return text + "\n\n" + source("tox -e bench -- rescale", [run])


def requests() -> str:
    """Requests to the store, counted by a proxy."""
    run = newest("requests", lambda run: True)
    found = run.data["requests"]
    usual, once = found["at_defaults"], found["run"]
    restart = found["restart_durable"]
    rows = [
        ("requests that commit an epoch", f"{once['commits_an_epoch']:.2f}"),
        ("the same with cleaning, at the defaults", f"{usual['requests_an_epoch']:.2f}"),
        ("largest manifest of a record", f"{once['manifest_bytes_max']:,} bytes"),
        ("requests of a restart beyond the records", restart["beyond_the_records"]),
    ]
    size = (
        f"{found['subtasks']} subtasks, {once['delta_bytes_a_subtask']} bytes of change each.\n\n"
    )
    text = size + table("what | measured", rows)
    return (
        text
        + "\n\n"
        + source("tox -e bench -- requests", [run])
        + " Counts do not mind a busy machine."
    )


def commits() -> str:
    """Synchronous and asynchronous commits on a store that is 100 ms away."""
    run = newest("commits")
    found = run.data["commits"]["commit"]["batch_ms"]
    rows = [(f'`commit="{mode}"`', f"{found[mode]:.0f} ms") for mode in ("sync", "async")]
    return table("a batch, median | ", rows) + "\n\n" + source("tox -e bench -- commits", [run])


def large() -> str:
    """One subtask with a gigabyte of state on S3."""
    run = newest("large")
    found = run.data["large"]
    usual, restore = found["defaults"], found["restore"]
    rows = [
        ("bytes sent for a changed byte, default settings", usual["sent_for_a_changed_byte"]),
        ("restore from the store", f"{restore['durable']['seconds']:.1f} s"),
        ("restore from the local copy", f"{restore['local']['seconds'] * 1000:.0f} ms"),
    ]
    size = f"{found['state_bytes'] / 1e9:.2f} GB of state, "
    changed = found["changed_bytes_an_epoch"] / 1e6
    size += f"{changed:.1f} MB of random keys changed in an epoch.\n\n"
    return size + table("what | measured", rows) + "\n\n" + source("tox -e bench -- large", [run])


def functions() -> str:
    """`applyInPandasWithState`, unmodified, through Spark's operator and through this."""
    rows, used = [], []
    for keys, per_key in ((100_000, 1), (10_000, 10), (100, 1000)):
        work = f"function-{per_key}"
        run = newest("throughput", lambda run, work=work: work in run.data["throughput"]["works"])
        used.append(run)
        one = run.data["throughput"]["works"][work]["configurations"][0]["rounds"][-1]
        spark, ours = one["spark"]["rows_per_s"], one["ours"]["rows_per_s"]
        row = (f"{keys:,}", f"{per_key:,}", f"{spark:,.0f}", f"{ours:,.0f}", f"{ours / spark:.1f}")
        rows.append(row)
    head = "keys in a batch | rows a key | Spark's operator, rows/s | this, rows/s | times"
    works = "function-1 function-10 function-1000"
    command = f"tox -e bench -- throughput --work {works} --rows 100000 --partitions 2"
    return table(head, rows) + "\n\n" + source(command, used)


def starts() -> str:
    """From a process's start to the first output, and the same after `kill -9`."""
    run = best("starts")
    found = run.data["starts"]
    rows = [
        (
            {"spark": "Spark's operator", "ours": "this"}[side],
            kind,
            f"{one['jvm_s']:.1f} s",
            f"{one['spark_s'] + one['ours_s']:.1f} s",
            f"{one['ours_s']:.1f} s" if side == "ours" else "",
            f"{one['process_to_first_output_s']:.1f} s",
        )
        for kind in ("first", "after kill -9")
        for side, one in ((side, found["median"][side][kind]) for side in ("spark", "ours"))
    ]
    size = f"A counter of {found['keys']:,} keys; medians.\n\n"
    head = "operator | start | the JVM | to the first call | of that ours | first output"
    text = size + table(head, rows)
    return text + "\n\n" + source("tox -e bench -- starts", [run])


def state_read() -> str:
    """Reading all of a state, in one process and in Spark."""
    run = best("state-read")
    found = run.data["state-read"]
    spark = found["in_spark"]
    rows = [
        ("`read_state`, files fetched and all decoded", f"{found['entries_per_s']:,}"),
        ("the same, by the second of a core", f"{found['entries_per_cpu_s']:,}"),
        ("scanned and decoded alone, by the second of a core", f"{found['decoded_per_cpu_s']:,}"),
        (
            '`spark.read.format("statebackend")`, one core',
            f"{spark['statebackend']['entries_per_s']:,}",
        ),
        (
            'Spark\'s own `format("statestore")` of its own state, in the JVM, one core',
            f"{spark['statestore']['entries_per_s']:,}",
        ),
    ]
    grown = found["memory_growth_bytes"] / 2**20
    size = f"{found['keys']:,} entries; the process grew by {grown:.0f} MiB meanwhile.\n\n"
    text = size + table("entries per second | ", rows)
    return text + "\n\n" + source("tox -e bench -- state-read", [run])


def monitoring() -> str:
    """What metrics, traces, a listener and the page cost."""
    run = best("monitoring")
    found = run.data["monitoring"]
    names = (("batch_ms", "a batch"), ("driver_cpu_ms", "processor time of the driver, a batch"))
    rows = []
    for name, what in names:
        plain, watched = (
            statistics.median(one[side][name] for one in found["rounds"])
            for side in ("plain", "watched")
        )
        more = f"{found[f'{name}_more_percent']:+.1f} %"
        rows.append((what, f"{plain:.1f} ms", f"{watched:.1f} ms", more))
    text = table("median | without | with | more, median of pairs", rows)
    return text + "\n\n" + source("tox -e bench -- monitoring", [run])


BLOCKS: dict[str, Callable[[], str]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        throughput,
        aggregate,
        growth,
        continuous,
        skew,
        kafka,
        recovery,
        rescale,
        requests,
        commits,
        large,
        functions,
        starts,
        state_read,
        monitoring,
    )
}


def drawn(text: str) -> str:
    """A page with its blocks made anew.

    Raises:
        KeyError: a block of a name that there is not.
    """

    def block(match: re.Match[str]) -> str:
        return f"<!-- figures: {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def main() -> int:
    for name in PAGES:
        page = ROOT / name
        page.write_text(drawn(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
