"""The report of a drill as text, for a terminal and for a failing test."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from recovery.drill.report.drill_report import (
    NOTHING_COMPARED,
    DrillReport,
    DriverLife,
    Recovery,
    Struck,
)
from recovery.drill.report.wording import after, how_it_went, verdict_line
from statebackend.texts import count, duration, seconds, size

__all__ = ["as_text"]

RECOVERIES_SHOWN_MAX: Final = 24


def as_text(report: DrillReport) -> str:
    """The report for a terminal: the verdict first, how to replay last; ends with a newline."""
    verdict = report.verdict
    lines = [_capital(verdict_line(report)) + "."]
    if verdict.failure and verdict.failure != NOTHING_COMPARED:
        lines += ["", *_indented(verdict.failure)]
    if verdict.examples:
        lines += ["", *(line for one in verdict.examples for line in _indented(one))]
    setting = (report.job, report.cluster, f"store {report.store}", f"commit {report.commit}")
    lines += [
        "",
        ", ".join(setting),
        f"{count(len(report.epochs), 'epoch')} by {count(len(report.drivers), 'driver')} "
        f"in {duration(report.duration_s)}, begun {report.started_at}",
    ]
    for title, rows in (
        ("Faults", [_fault_row(one) for one in report.faults]),
        ("Drivers", [_driver_row(one) for one in report.drivers]),
        ("Recoveries", _recovery_rows(report.recoveries)),
        ("Requests", _request_rows(report)),
        ("Warnings", [(one,) for one in report.warnings]),
    ):
        if rows:
            lines += ["", title, *_aligned(rows)]
    replay = report.command or f"run_drill(..., seed={report.seed})"
    lines += ["", f"Replay: {replay}"]
    return "\n".join(lines) + "\n"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.splitlines() or [""]]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; a row with fewer cells is not looked at for widths.

    Cells that begin with a digit and stand under one another are set to the right.
    """
    full = max(len(row) for row in rows)
    widths = [
        max((len(row[i]) for row in rows if len(row) == full), default=0) for i in range(full)
    ]
    numbers = [all(row[i][:1].isdigit() for row in rows if len(row) == full) for i in range(full)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=False)
        )
        lines.append("  " + "  ".join(cells if len(row) == full else row).rstrip())
    return lines


def _fault_row(struck: Struck) -> tuple[str, ...]:
    return (
        struck.fault,
        f"{struck.at_s:.1f} s",
        after(struck),
        "" if struck.until_s is None else f"for {seconds(struck.until_s - struck.at_s)}",
        how_it_went(struck),
        struck.target,
    )


def _driver_row(life: DriverLife) -> tuple[str, ...]:
    ready = "never ready" if life.ready_s is None else f"ready at {life.ready_s:.1f} s"
    ended = "" if life.ended_s is None else f" at {life.ended_s:.1f} s"
    first_line = (life.error.strip().splitlines() or [""])[0]
    row = (str(life.number), f"{life.started_s:.1f} s", ready, f"{life.ending}{ended}", first_line)
    return row


def _recovery_rows(recoveries: Sequence[Recovery]) -> list[tuple[str, ...]]:
    """A line per source, then one for each recovery; of very many the slowest, in order of time."""
    rows: list[tuple[str, ...]] = []
    for source in sorted({one.report.source for one in recoveries}):
        reports = [one.report for one in recoveries if one.report.source == source]
        times_s = [report.seconds for report in reports]
        local, durable = (
            sum(report.local_bytes for report in reports),
            sum(report.durable_bytes for report in reports),
        )
        rows.append(
            (
                f"{source}: {len(reports)}, median {seconds(median(times_s))}, "
                f"longest {seconds(max(times_s))}, {size(local)} local, {size(durable)} durable "
                f"in {count(sum(report.durable_reads for report in reports), 'read')}",
            )
        )
    told = sorted(
        (one for one in recoveries if one.report.source != "empty"),
        key=lambda one: -one.report.seconds,
    )
    shown = sorted(told[:RECOVERIES_SHOWN_MAX], key=lambda one: (one.at_s, one.report.subtask))
    rows += [_recovery_row(one) for one in shown]
    if len(told) > RECOVERIES_SHOWN_MAX:
        left = count(len(told) - RECOVERIES_SHOWN_MAX, "quicker one")
        rows.append((f"and {left}: the JSON report has all",))
    return rows


def _recovery_row(one: Recovery) -> tuple[str, ...]:
    report = one.report
    return (
        f"{report.operator} {report.subtask}",
        f"{one.at_s:.1f} s",
        f"driver {one.driver}",
        report.source,
        seconds(report.seconds),
        f"{size(report.local_bytes)} local",
        f"{size(report.durable_bytes)} in {count(report.durable_reads, 'read')}",
        report.reason,
    )


def _request_rows(report: DrillReport) -> list[tuple[str, ...]]:
    return [
        (
            f"{one.verb} {one.group}",
            f"{one.requests:,}",
            f"{one.faulted:,} faulted",
            f"{size(one.in_bytes)} in",
            f"{size(one.out_bytes)} out",
        )
        for one in report.requests
    ]
