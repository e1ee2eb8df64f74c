"""How much memory an epoch takes that is far over its budget: `python -m bench.spill_memory`.

One subtask's whole way, without Spark: rows are made batch by batch, staged, grouped, counted in a
value state (whose row carries a payload, so that the changes are large too), frozen, encoded,
decoded again and applied to RocksDB. Each run is a process of its own. Printed is how far the
resident memory rose in a large run over a small one: RssAnon sampled at each stage (what the
process holds itself) and VmHWM (the peak, files that are mapped included).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from bench.machine import ROOT
from snapshot.formats.delta_in_pieces import as_lists, encode_frozen, iter_delta
from statebackend.key_hashing import key_groups
from statebackend.operators.input.staging import InputStage
from statebackend.operators.per_key_loop import KeyOperator
from statebackend.operators.rows.row_reader import RowReader
from statebackend.operators.rows.row_writer import RowWriter
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.spark.worker.epoch_input import NONCE_BITS, InputShape, read_epoch
from statebackend.state.cells import KeyCursor, ValueCell
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import StateTable

MAX_PARALLELISM = 128
BATCH_ROWS = 10_000
SMALL_ROWS = 50_000
INPUT = T.StructType(
    [
        T.StructField("k", T.LongType()),
        T.StructField("v", T.LongType()),
        T.StructField("text", T.StringType()),
    ]
)
STATE = T.StructType([T.StructField("n", T.LongType()), T.StructField("text", T.StringType())])
OUTPUT = T.StructType([T.StructField("k", T.LongType()), T.StructField("n", T.LongType())])
ARROW = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("text", pa.string())])
KEY = KeyCodec(T.StructType([INPUT["k"]]))


def main() -> int:
    arguments = _arguments()
    if arguments.inner:
        work = Path(tempfile.mkdtemp(prefix="spill-", dir=arguments.work))
        try:
            print(json.dumps(_run(arguments, work)))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return 0
    large = arguments.input_mb * 1_000_000 // _row_bytes(arguments)
    small = _process(arguments, SMALL_ROWS, min(arguments.keys or SMALL_ROWS, SMALL_ROWS))
    found = _process(arguments, large, arguments.keys or large)
    for name, one in (("small", small), ("large", found)):
        print(name, json.dumps(one))
    for what in ("peak_rss_anon_mb", "vm_hwm_mb"):
        print(f"{what}: {found[what] - small[what]:+.0f} MB over the small run")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-mb", type=int, default=1500)
    parser.add_argument("--text-bytes", type=int, default=180, help="of a row's payload")
    parser.add_argument("--keys", type=int, default=0, help="distinct keys (0: one per row)")
    parser.add_argument("--hot", type=float, default=0.0, help="share of rows of one key")
    parser.add_argument("--budget-mb", type=int, default=64)
    parser.add_argument("--overlay-mb", type=int, default=64)
    parser.add_argument("--rows", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row_bytes(arguments: argparse.Namespace) -> int:
    return int(arguments.text_bytes) + 20


def _process(arguments: argparse.Namespace, rows: int, keys: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.spill_memory", "--inner", f"--rows={rows}"]
    command += [f"--keys={keys}", f"--text-bytes={arguments.text_bytes}", f"--hot={arguments.hot}"]
    command += [f"--budget-mb={arguments.budget_mb}", f"--overlay-mb={arguments.overlay_mb}"]
    command += [f"--work={arguments.work}"] if arguments.work else []
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


# --- one run -----------------------------------------------------------------------------------


class _Memory:
    """Resident memory by stage, in MB."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self.stages: dict[str, float] = {}
        self._started_s = time.perf_counter()

    def look(self) -> None:
        self.peak_mb = max(self.peak_mb, status_mb("RssAnon"))

    def mark(self, name: str) -> None:
        self.look()
        now_s = time.perf_counter()
        self.stages[f"{name}_s"] = round(now_s - self._started_s, 2)
        self.stages[f"{name}_peak_mb"] = round(self.peak_mb)
        self.stages[f"{name}_hwm_mb"] = round(status_mb("VmHWM"))
        self._started_s = now_s


def status_mb(name: str) -> float:
    """A size of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def _rows(arguments: argparse.Namespace, memory: _Memory) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(7)
    names = [*ARROW.names, "key_group", "subtask", "stamp"]
    for start in range(0, arguments.rows, BATCH_ROWS):
        rows = min(BATCH_ROWS, arguments.rows - start)
        keys = random.integers(0, arguments.keys, rows)
        keys[random.random(rows) < arguments.hot] = 1
        # Half of the payload does not compress.
        noise = random.bytes(rows * arguments.text_bytes // 4).hex()
        width = len(noise) // rows
        text = [noise[i * width : (i + 1) * width].ljust(arguments.text_bytes) for i in range(rows)]
        column = pa.array(keys, pa.int64())
        columns = [column, column, pa.array(text, pa.string())]
        columns.append(pa.array(key_groups([column], MAX_PARALLELISM).astype(np.int32)))
        columns.append(pa.array(np.zeros(rows, np.int32)))
        columns.append(pa.array(np.zeros(rows, np.int64)))
        memory.look()
        yield pa.RecordBatch.from_arrays(columns, names=names)
    nothing = [pa.nulls(1, kind) for kind in (pa.int64(), pa.int64(), pa.string(), pa.int32())]
    barrier = [pa.array([-1], pa.int32()), pa.array([1 << NONCE_BITS], pa.int64())]
    yield pa.RecordBatch.from_arrays([*nothing, *barrier], names=names)


def _run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    memory = _Memory()
    store = RocksStore.open(str(work / "db"))
    stage = InputStage(
        ARROW,
        key_positions=(0,),
        budget_bytes=arguments.budget_mb << 20,
        folder=lambda: work / "input",
    )
    spill = OverlaySpill(limit_bytes=arguments.overlay_mb << 20, folder=lambda: work / "overlay")
    memory.mark("start")
    taken = read_epoch(
        _rows(arguments, memory),
        InputShape("spill", ARROW, (0,), 1, MAX_PARALLELISM),
        stage=stage,
    )
    memory.mark("read")
    table = StateTable(store, spill=spill)
    output_rows = _count(taken, table, memory)
    taken.close()
    memory.mark("process")
    encoded = encode_frozen(table.freeze(0), lambda: work / "delta")
    memory.mark("encode")
    source = encoded.path if encoded.path is not None else encoded.data
    assert source is not None
    pieces = iter_delta(source, digest=encoded.digest, name="delta")
    store.apply_batches(_looking(as_lists(pieces), memory), _marker())
    memory.mark("apply")
    spill.close()
    store.close()
    return {
        "rows": arguments.rows,
        "output_rows": output_rows,
        "staged_mb": round(stage.staged_bytes / 1e6),
        "changed": encoded.rows,
        "delta_mb": round(encoded.size_bytes / 1e6, 1),
        "peak_rss_anon_mb": round(memory.peak_mb),
        "vm_hwm_mb": round(status_mb("VmHWM")),
        **memory.stages,
    }


def _count(taken: Any, table: StateTable, memory: _Memory) -> int:
    cursor = KeyCursor()
    cell = ValueCell(cursor, table, "count", 1, codec_for(STATE))
    operator = KeyOperator(
        uid="spill",
        cursor=cursor,
        reader=RowReader(INPUT, (0,), timezone="UTC"),
        writer=RowWriter(OUTPUT, lambda: "The processor"),
    )

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> list[tuple[int, int]]:
        before, last = cell.get(), ""
        total = before[0] if before else 0
        for row in rows:
            total, last = total + 1, row.text
        cell.update((total, last))
        return [(key[0], total)]

    output_rows = 0
    for batch in operator.run_parts(taken.groups(KEY), call):
        output_rows += batch.num_rows
        memory.look()
    return output_rows


def _looking(pieces: Iterator[Any], memory: _Memory) -> Iterator[Any]:
    for piece in pieces:
        memory.look()
        yield piece


def _marker() -> Marker:
    return Marker(
        job_id="", operator="spill", key_group_start=0, key_group_end=127, epoch=0, chain="c"
    )


if __name__ == "__main__":
    sys.exit(main())
