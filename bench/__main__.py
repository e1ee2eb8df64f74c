"""The command line: `python -m bench NAME`, with no name or `all` for every one of them."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.kafka.kafka_names import SIDES as KAFKA_SIDES
from bench.machine import ROOT, busy_share, describe
from bench.sizes import FULL, QUICK, Sizes
from bench.works import AGGREGATES, WORKS

_BENCHMARKS = (
    "throughput",
    "aggregate",
    "growth",
    "rmw",
    "scan",
    "epochs",
    "takeover",
    "handover",
    "recovery",
    "starts",
    "rescale",
    "state-read",
    "profile",
    "requests",
    "commits",
    "monitoring",
    "large",
    "memory",
    "exchange",
    "continuous",
    "skew",
    "kafka",
)
_VECTORS = ("aggregate", "growth", "rmw", "scan")
_SIDES = ("spark", "ours", "flink")
_SIDED = ("aggregate", "growth", "continuous", "starts", "kafka")
_NOISY = 0.15


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped, too
    arguments = _arguments()
    sizes = (QUICK if arguments.quick else FULL).with_rounds(arguments.rounds)
    if arguments.partitions:
        sizes = replace(sizes, partitions=tuple(arguments.partitions))
    if arguments.map_keys:
        sizes = replace(sizes, map_keys=arguments.map_keys)
    if arguments.rows:
        sizes = replace(sizes, rows=arguments.rows, pandas_rows=arguments.rows)
    wanted = _BENCHMARKS if arguments.benchmark == "all" else (arguments.benchmark,)
    machine = describe()
    machine["busy_share_at_start"] = busy = busy_share(2.0)
    if busy > _NOISY:
        _say(f"the machine is {busy:.0%} busy with other things: absolute figures mean little")
    results: dict[str, Any] = {"machine": machine, "sizes": sizes.to_json()}
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.folder))
    started_s = time.monotonic()
    try:
        texts = [_run(name, sizes, work, arguments, results) for name in wanted]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results["seconds"] = round(time.monotonic() - started_s, 1)
    results["busy_share_at_end"] = busy_share(2.0)
    path = _written(results, arguments, wanted)
    print(_header(machine), *texts, sep="\n\n")
    _say(f"written to {path}")
    return 0


def _run(
    name: str, sizes: Sizes, work: Path, arguments: argparse.Namespace, results: dict[str, Any]
) -> str:
    # Imported when asked for: each brings in a part of the product, which may be under the knife.
    if name == "throughput":
        from bench.throughput import throughput
        from bench.throughput_text import throughput_text

        found = throughput(
            sizes,
            names=[work for work in arguments.works if work not in AGGREGATES],
            work=work,
            floor=arguments.floor,
            s3=arguments.s3,
            progress=_say,
        )
        text = throughput_text(found, layers=arguments.profile)
    elif name in ("continuous", "skew", "kafka"):
        found, text = _run_continuous(name, sizes, work, arguments)
    elif name in _VECTORS:
        found, text = _run_vectors(name, sizes, work, arguments)
    elif name == "epochs":
        from bench.epochs import epochs, epochs_text

        found = epochs(sizes, work=work, progress=_say)
        text = epochs_text(found)
    elif name == "takeover":
        from bench.takeover import takeover, takeover_text

        found = takeover(keys=sizes.keys, changed=sizes.changed_keys, repeats=sizes.repeats)
        text = takeover_text(found)
    elif name == "exchange":
        from bench.exchange import exchange, exchange_text

        batches, seconds = (200, 2.0) if sizes.name == "quick" else (4000, 20.0)
        found = exchange(batches=batches, repeats=sizes.rounds, seconds=seconds, progress=_say)
        text = exchange_text(found)
    elif name == "profile":
        from bench.profile_task import profile, profile_text

        top = arguments.top if arguments.profile else 0
        found = profile(keys=sizes.changed_keys, repeats=sizes.repeats, top=top)
        text = profile_text(found)
    else:
        found, text = _run_store(name, sizes, work, arguments)
    results[name] = found
    return text


def _run_continuous(
    name: str, sizes: Sizes, work: Path, arguments: argparse.Namespace
) -> tuple[Any, str]:
    """The benchmarks of jobs without micro-batches."""
    folder, quick = work / name, sizes.name == "quick"
    folder.mkdir()
    if name == "kafka":
        from bench.kafka.kafka_bench import kafka, kafka_text

        found = kafka(
            quick=quick,
            rounds=sizes.rounds,
            sides=arguments.sides or KAFKA_SIDES,
            rate=arguments.rate,
            profile=arguments.profile,
            work=folder,
            progress=_say,
        )
        return found, kafka_text(found)
    from bench.continuous import continuous, continuous_text, plot, skew, skew_text

    if name == "skew":
        found = skew(quick=quick, work=folder, progress=_say)
        if arguments.plot:
            plot(found, Path(arguments.plot))
        return found, skew_text(found)
    found = continuous(
        quick=quick,
        rounds=sizes.rounds,
        sides=arguments.sides or _SIDES,
        flink=arguments.flink,
        work=folder,
        progress=_say,
    )
    return found, continuous_text(found)


def _run_vectors(
    name: str, sizes: Sizes, work: Path, arguments: argparse.Namespace
) -> tuple[Any, str]:
    """The benchmarks of the vectorised path."""
    folder = work / name
    folder.mkdir()
    if name == "scan":
        from bench.scan import scan, scan_text

        found = scan(keys=sizes.scan_keys, sizes=(10, 100), repeats=2, work=folder, progress=_say)
        return found, scan_text(found)
    if name == "rmw":
        from bench.rmw import rmw, rmw_text

        found = rmw(keys=sizes.rmw_keys, repeats=sizes.repeats, work=folder, progress=_say)
        return found, rmw_text(found)
    from bench.aggregate import aggregate, aggregate_text, growth, growth_text, plot

    sides = arguments.sides or _SIDES
    if name == "growth":
        sides = [side for side in sides if side != "flink"]
        found = growth(sizes, sides=sides, work=folder, progress=_say)
        if arguments.plot:
            plot(found, Path(arguments.plot))
        return found, growth_text(found)
    works = [work for work in arguments.works if work in AGGREGATES] or AGGREGATES
    found = aggregate(
        sizes, sides=sides, works=works, flink=arguments.flink, work=folder, progress=_say
    )
    return found, aggregate_text(found, layers=arguments.profile)


def _run_store(
    name: str, sizes: Sizes, work: Path, arguments: argparse.Namespace
) -> tuple[Any, str]:
    """The benchmarks of the checkpoint path."""
    quick = sizes.name == "quick"
    folder = work / name
    folder.mkdir()
    if name == "requests":
        from bench.requests import requests, requests_text

        subtasks, epochs = (8, 16) if quick else (200, 20)
        found = requests(
            subtasks=subtasks, epochs=epochs, spark_batches=3, work=folder, progress=_say
        )
        return found, requests_text(found)
    if name == "commits":
        from bench.commits import commits, commits_text

        found = commits(batches=8 if quick else 14, rounds=sizes.rounds, work=folder, progress=_say)
        return found, commits_text(found)
    if name == "monitoring":
        from bench.monitoring import monitoring, monitoring_text

        count = 20 if quick else 60
        found = monitoring(batches=count, rounds=sizes.rounds, work=folder, progress=_say)
        return found, monitoring_text(found)
    if name == "large":
        from bench.large import large, large_text

        found = large(state_mb=64 if quick else 1024, work=folder, progress=_say)
        return found, large_text(found)
    if name == "memory":
        from bench.memory import memory, memory_text

        found = memory(base_mb=64 if quick else 1024, input_mb=200 if quick else 4000, work=folder)
        return found, memory_text(found)
    if name == "recovery":
        from bench.recovery import recovery, recovery_text

        found = recovery(
            state_bytes=(64 if quick else 1024) << 20, repeats=3 if quick else 7, work=folder
        )
        return found, recovery_text(found)
    if name == "state-read":
        from bench.state_read import state_read, state_read_text

        found = state_read(keys=200_000 if quick else 10_000_000, work=folder, progress=_say)
        return found, state_read_text(found)
    if name == "starts":
        from bench.starts import starts, starts_text

        found = starts(
            keys=1_000 if quick else sizes.keys,
            rounds=sizes.rounds,
            sides=arguments.sides or _SIDES,
            profile=arguments.profile,
            work=folder,
            progress=_say,
        )
        return found, starts_text(found)
    if name == "rescale":
        from bench.rescale import rescale, rescale_text

        found = rescale(keys=400_000 if quick else 10_000_000, work=folder, progress=_say)
        return found, rescale_text(found)
    from bench.handover import handover, handover_text

    found = handover(keys=sizes.keys, repeats=sizes.repeats, work=folder)
    return found, handover_text(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks.")
    parser.add_argument("benchmark", nargs="?", choices=(*_BENCHMARKS, "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="small sizes: is the harness right?")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--partitions", type=int, nargs="+", help="configurations to compare in")
    parser.add_argument(
        "--work",
        nargs="+",
        choices=tuple(WORKS),
        default=["counter"],
        dest="works",
        help="what `throughput` compares (default: counter), or `aggregate` (default: all counts)",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=KAFKA_SIDES,
        help="of `aggregate`, `growth`, `continuous`, `starts` and `kafka` (default: all)",
    )
    parser.add_argument("--rate", type=int, help="`kafka`: rows a second that are offered")
    parser.add_argument(
        "--flink", help="`aggregate`, `continuous`: the folder of Flink's jars, or for them"
    )
    parser.add_argument("--plot", help="`growth`, `skew`: where the curve goes as a PNG")
    parser.add_argument("--s3", action="store_true", help="`throughput`: our store is on S3")
    parser.add_argument("--map-keys", type=int, help="keys of the work with maps, 100 entries each")
    parser.add_argument("--rows", type=int, help="rows of a batch in `throughput`")
    parser.add_argument("--floor", action="store_true", help="also stateless queries' throughput")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="layers of our side; cProfile in `profile`, `starts`; py-spy in `kafka`",
    )
    parser.add_argument("--top", type=int, default=30, help="functions that cProfile shows")
    parser.add_argument("--folder", help="where input, checkpoints and state go (default: /tmp)")
    parser.add_argument("--out", help="the JSON file (default: bench/results/<time>.json)")
    arguments = parser.parse_args()
    if arguments.sides and arguments.benchmark not in ("all", *_SIDED):
        parser.error(f"`{arguments.benchmark}` always runs all its sides: --sides is for others")
    if arguments.benchmark != "kafka" and set(arguments.sides or ()) - set(_SIDES):
        parser.error(f"`{arguments.benchmark}` has the sides {', '.join(_SIDES)}")
    return arguments


def _written(results: dict[str, Any], arguments: argparse.Namespace, wanted: Any) -> Path:
    if arguments.out:
        path = Path(arguments.out)
    else:
        stamp = results["machine"]["time_utc"].replace(":", "").replace("-", "")
        parts = [stamp, results["sizes"]["name"], *wanted]
        if "throughput" in results:
            parts += [*results["throughput"]["works"], results["throughput"]["store"]]
        name = f"{'-'.join(parts)}.json"
        path = ROOT / "bench" / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def _header(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['os']}\npython {machine['python']}, {machine['java']}, {packages}\n"
        f"commit {machine['git_commit'][:12]}, {machine['git_changed_files']} changed files, "
        f"{machine['busy_share_at_start']:.0%} busy at the start, {machine['time_utc']}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
