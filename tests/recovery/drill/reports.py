"""Drill reports made by hand: what the report, the plugin and the command line are shown."""

from __future__ import annotations

from typing import Any

from recovery.drill.report.drill_report import (
    DrillReport,
    DriverLife,
    EpochDone,
    Recovery,
    RequestCount,
    Struck,
    Verdict,
)
from snapshot.protocol.messages import RestoreReport

EXACT = Verdict(exact=True, expected=4043, found=4043, lost=0, duplicated=0, wrong=0)
LOSSES = Verdict(
    exact=False,
    expected=4043,
    found=4042,
    lost=2,
    duplicated=1,
    wrong=0,
    examples=["lost ('ann', 3)", "lost ('<script>alert(1)</script>', 4)", "duplicated ('bob', 1)"],
)


def recovery(
    subtask: int, source: str, *, at_s: float, driver: int = 1, operator: str = "totals"
) -> Recovery:
    near, far = {
        "empty": (0, 0),
        "local": (40_000, 0),
        "mixed": (40_000, 3_000),
        "durable": (0, 43_000),
    }[source]
    report = RestoreReport(
        operator=operator,
        subtask=subtask,
        epoch=4,
        source=source,
        local_bytes=near,
        durable_bytes=far,
        durable_reads=3 if far else 0,
        seconds=0.02 + subtask / 10,
        host="127.0.0.2",
        executor="0",
        reason="the local copy is gone" if source == "durable" else "",
    )
    return Recovery(at_s=at_s, driver=driver, report=report)


def full_report(**changed: Any) -> DrillReport:
    """Two drivers, three faults of which one could not be made, every source, and a request."""
    shown: dict[str, Any] = {
        "job": "totals",
        "seed": 77,
        "command": "statebackend drill run totals --faults executor-killed --seed 77",
        "cluster": "two-hosts",
        "store": "file",
        "commit": "sync",
        "started_at": "2026-03-01 10:00:00Z",
        "duration_s": 41.2,
        "verdict": EXACT,
        "faults": [
            Struck(
                fault="executor-killed",
                at_s=11.0,
                at_epoch=3,
                target="executor 4711 on 127.0.0.2",
                recovered_s=2.34,
            ),
            Struck(
                fault="store-down",
                at_s=17.0,
                at_epoch=5,
                target="every request",
                until_s=20.0,
                recovered_s=3.5,
            ),
            Struck(fault="disk-full", at_s=23.0, at_epoch=6, skipped="there is no compiler"),
        ],
        "drivers": [
            DriverLife(number=1, started_s=0.0, ready_s=5.2, ended_s=24.0, ending="killed"),
            DriverLife(number=2, started_s=24.1, ready_s=29.0, ended_s=40.0, ending="finished"),
        ],
        "epochs": [
            EpochDone(epoch=n, at_s=6.0 + 2.5 * n, driver=1 if n < 7 else 2) for n in range(13)
        ],
        "recoveries": [
            *(recovery(n, "empty", at_s=5.5) for n in range(4)),
            recovery(0, "local", at_s=12.0),
            recovery(1, "mixed", at_s=12.1),
            *(recovery(n, "durable", at_s=29.4, driver=2) for n in range(4)),
        ],
        "requests": [
            RequestCount(
                verb="PUT", group="log", requests=1300, faulted=7, in_bytes=2048, out_bytes=0
            )
        ],
        "warnings": [],
    }
    return DrillReport(**{**shown, **changed})
