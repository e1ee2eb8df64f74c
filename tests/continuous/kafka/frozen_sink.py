"""A process that commits a piece, and stops itself on its way; whoever thaws it hears of the end.

``python -m tests.continuous.kafka.frozen_sink SERVERS WHERE PIECE``: the piece in hexadecimal.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from statebackend.continuous.kafka.kafka_connection import KafkaConnection
from statebackend.continuous.sinks import kafka_commits
from statebackend.continuous.sinks.kafka_commits import Commits, KafkaCommitter
from statebackend.errors import ConnectorError

JOB, UID = "job", "out"


def frozen(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def main(servers: str, where: str, piece: bytes) -> None:
    commits = Commits(KafkaConnection(servers), *kafka_commits.names_of(JOB, UID, "", ""))
    if where == "before all":
        frozen()
    commits.open(begun=True)
    if where == "before the transaction":
        frozen()
    if where == "in the transaction":
        until_done = commits._until_done

        def later(what: str, call: Any) -> None:
            assert commits._producer is not None
            # The records are in the topic then, for who reads uncommitted ones.
            commits._producer.client.flush(60)
            frozen()
            until_done(what, call)

        commits._until_done = later  # type: ignore[method-assign]
    try:
        KafkaCommitter(commits, eager=True).commit([piece])
    except ConnectorError as error:
        print(f"refused: {error}", flush=True)
    else:
        print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))
