"""Where our side's time goes in a running query: read off the records, and off the driver's door.

Each subtask sends its phases (``timings_ms``) with its ack, and the record's manifest keeps them.
What the driver spends in ``begin`` and ``ack`` (the ack that completes an epoch waits for its
record) is timed around the session's two methods.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["PHASES", "summarise", "task_layers", "watch_session"]

PHASES = ("read", "group", "restore", "process", "snapshot", "base", "close")
"""In the order in which a task goes through them."""


def task_layers(uri: str, job: str, options: Any = None) -> list[dict[str, Any]]:
    """One entry per subtask and epoch, from every record of a job's log.

    Args:
        options: how the store is reached (StoreOptions), if not as a folder.
    """
    from snapshot.log.commit_log import CommitLog
    from snapshot.storage.stores_by_uri import open_store
    from statebackend import system

    store = open_store(uri, new_id=system.new_id, options=options)
    log = CommitLog(store, job=job, writer="bench", new_id=system.new_id)
    entries = [e for sequence in log.sequences() for e in log.read(sequence).slices]
    return [
        {
            "epoch": entry.epoch,
            "subtask": entry.subtask,
            "rows": entry.rows,
            "size_bytes": entry.size_bytes,
            "inline": entry.object is None,
            "timings_ms": dict(entry.timings_ms),
        }
        for entry in entries
        if entry.kind == "delta"
    ]


@contextlib.contextmanager
def watch_session() -> Iterator[dict[str, list[float]]]:
    """Sessions made inside note how long each of their answers took: ``<verb>`` -> milliseconds."""
    from statebackend.runtime.driver.session import RunSession

    calls: dict[str, list[float]] = defaultdict(list)
    lock = threading.Lock()

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            answer = method(*arguments)
            took_ms = (time.perf_counter() - start_s) * 1000
            durable = getattr(answer, "durable", False)
            with lock:
                calls[f"{name} that commits" if durable else name].append(round(took_ms, 3))
            return answer

        return call

    plain = {name: getattr(RunSession, name) for name in ("begin", "ack")}
    for name, method in plain.items():
        setattr(RunSession, name, timed(name, method))
    # Left in place: this process runs one query, which answers until it ends.
    yield calls


def summarise(layers: list[dict[str, Any]], epochs: range) -> dict[str, Any]:
    """Medians over the counted epochs and all subtasks: phases, and the sums that are asked for.

    ``after_input_ms``: from the last input row to the ack. A task reads its whole input first, so
    that is everything but ``read``. ``after_output_ms``: from the last *processed* row to the ack.
    """
    counted = [layer for layer in layers if layer["epoch"] in epochs]
    if not counted:
        return {}
    names = [p for p in PHASES if any(p in layer["timings_ms"] for layer in counted)]
    names += sorted({n for layer in counted for n in layer["timings_ms"]} - set(names))

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 2)

    def total(layer: dict[str, Any], leave_out: tuple[str, ...]) -> float:
        return sum(ms for name, ms in layer["timings_ms"].items() if name not in leave_out)

    return {
        "subtasks_counted": len(counted),
        "changed_keys": median([layer["rows"] for layer in counted]),
        "delta_bytes": median([layer["size_bytes"] for layer in counted]),
        "phases_ms": {
            name: median([layer["timings_ms"].get(name, 0.0) for layer in counted])
            for name in names
        },
        "task_ms": median([total(layer, ()) for layer in counted]),
        "after_input_ms": median([total(layer, ("read",)) for layer in counted]),
        "after_output_ms": median(
            [total(layer, ("read", "group", "restore", "process")) for layer in counted]
        ),
    }
