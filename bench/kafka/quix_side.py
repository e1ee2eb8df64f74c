"""One process of Quix Streams' side, until it is ended: `python quix_side.py TASK.json`.

It runs in an environment of its own, so it imports nothing of this repository. The input's records
are keyed by what is counted, so no repartitioning is needed. State is in RocksDB, with a changelog
topic.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def run(task: dict[str, Any]) -> None:
    from quixstreams import Application

    app = Application(
        broker_address=task["servers"],
        consumer_group=f"quix-{task['target']}",
        auto_offset_reset="earliest",
        commit_interval=task["checkpoint_s"],
        processing_guarantee="exactly-once" if task["exactly_once"] else "at-least-once",
        state_dir=f"{task['work']}/state-{task['number']}",
        loglevel="WARNING",
    )
    source = app.topic(task["source"], key_deserializer="bytes", value_deserializer="json")
    target = app.topic(task["target"], key_serializer="bytes", value_serializer="json")

    def count(row: Any, state: Any) -> dict[str, int]:
        n = state.get("n", 0) + 1
        state.set("n", n)
        return {"k": row["k"], "n": n}

    app.dataframe(source).apply(count, stateful=True).to_topic(target)
    app.run()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
