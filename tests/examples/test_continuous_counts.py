"""The bids of the example, counted by its processor, against its own truth; without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from examples import continuous_counts as example
from statebackend import NexmarkSource, ProcessorTester

ROWS = 2_000


def _batches(source: NexmarkSource) -> Iterator[pa.RecordBatch]:
    for split in source.discover(None).splits:
        reader = source.open(split, None)
        while not reader.ended:
            batch = reader.read(300)
            if batch is not None and batch.num_rows:
                yield batch
        reader.close()


def test_the_processor_counts_every_bid_of_the_source_once() -> None:
    counted: Counter[int] = Counter()
    with ProcessorTester(
        example.Bids(), keySchema="auction bigint", outputSchema=example.OUTPUT
    ) as tester:
        for batch in _batches(example.source(ROWS)):
            for row in tester.testBatch(batch).to_pylist():
                counted[row["auction"]] = max(counted[row["auction"]], row["bids"])
            tester.restart()
    assert counted == example.truth(ROWS)
