"""Makes `jobs/format1`, in a checkout of commit 3b393f5^ (the last with record format 1):

git archive 3b393f5^ | tar x -C OLD; cd OLD; PYTHONPATH=. python make_format1.py TARGET

It does not run in today's tree. What the job holds is said in `tests/recovery/golden_job.py`.
"""

# mypy: ignore-errors
from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructType

from bench import inproc
from bench.inproc import Harness
from statebackend.hashing import key_groups
from statebackend.spark.task import SubtaskTask
from statebackend.spark.tws import record_states


class Seen(StatefulProcessor):
    def init(self, handle):
        word, number = StructType().add("word", "string"), StructType().add("v", "long")
        last = StructType().add("n", "long").add("word", "string").add("at", "timestamp")
        self.last = handle.getValueState("last", last)
        self.all = handle.getListState("all", number)
        self.times = handle.getMapState("times", word, StructType().add("n", "integer"))

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            n = (self.last.get() or (0,))[0] + 1
            word = f"w{row.v % 3}"
            self.last.update((n, word, None))
            self.all.appendValue((row.v,))
            times = self.times.getValue((word,))
            self.times.updateValue((word,), ((times[0] if times else 0) + 1,))
        yield Row(k=key[0], n=n)

    def close(self):
        pass


def batches(epoch):
    keys = np.array([k for k in range(10) if (k + epoch) % 3], np.int64)
    values = np.full(len(keys), epoch, np.int64)
    groups = key_groups([pa.array(keys)], inproc.MAX_PARALLELISM).astype(np.int32)
    owner = np.zeros(len(keys), np.int32)
    stamps = pa.nulls(len(keys), inproc._CONTROL[2].type)
    rows = [pa.array(keys), pa.array(values), pa.array(groups), pa.array(owner), stamps]
    last = [[None], [None], [None], [~0], [1_700_000_000_000_000 + epoch * 1_000_000]]
    types = [field.type for field in inproc._SCHEMA]
    end = [pa.array(column, kind) for column, kind in zip(last, types, strict=True)]
    return [pa.RecordBatch.from_arrays(one, schema=inproc._SCHEMA) for one in (rows, end)]


def main(target):
    with tempfile.TemporaryDirectory() as folder:
        declared = record_states(Seen(), "op")
        declared = {one.name: one for one in declared}
        inproc.UID = "op"
        real = inproc.OperatorSpec

        def spec(**given):
            states = {name: number for number, name in enumerate(declared, start=1)}
            schemas = {name: one.to_json() for name, one in declared.items()}
            key = StructType(inproc.INPUT.fields[:1])
            given |= {"states": states, "schemas": {"": key.json(), **schemas}}
            return real(**given)

        inproc.OperatorSpec = spec
        harness = Harness(Path(folder), keys=1, overrides={"base_every_epochs": 3})
        harness.spec = dataclasses.replace(harness.spec, states=declared)
        harness.task = SubtaskTask(harness.spec, Seen(), harness.task.token)
        for epoch in range(5):
            harness.run(batches(epoch))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(folder) / "store", target)


if __name__ == "__main__":
    main(sys.argv[1])
