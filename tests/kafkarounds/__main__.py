"""``python -m tests.kafkarounds``: a job from Kafka to Kafka or a lake table, killed over and over.

Three brokers, two hosts with an executor each. In each round a Python worker, an executor, the
driver or a broker gets SIGKILL, while rows come; then everything that was sent until then must have
come out. A consumer that reads committed records, or a reader of the table, compares every row with
a truth made without Spark. Exit 1 if a row is missing, wrong, or (exactly once) there twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.kafkarounds.rounds import KINDS, Rounds

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mode", default="continuous", choices=["continuous", "sync", "async"])
    parser.add_argument(
        "--sink",
        default="exactly-once",
        choices=["exactly-once", "at-least-once", "foreach-batch", "delta", "iceberg"],
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round after these")
    given = parser.parse_args()
    # `timeout` ends us by SIGTERM: the brokers, in sessions of their own, must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("STATEBACKEND_KAFKA", "1")
    folder = Path(tempfile.mkdtemp(prefix="kafkarounds-"))
    print(f"in {folder}", flush=True)
    rounds = Rounds(folder, given.mode, given.sink, given.seed)
    sys.exit(0 if rounds.run(given.rounds, given.kinds, given.minutes) else 1)
