"""A job's history as people read it."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.markup import escape

from recovery.inspect.history import (
    CheckpointFigures,
    History,
    OperatorFigures,
    RestoreSummary,
)
from statebackend.cli.console_output import counted, table
from statebackend.texts import size, when

__all__ = ["checkpoint", "history"]

_COLOURS: Final = {"complete": "", "running": "cyan", "failed": "red", "discarded": "yellow"}
_SHOWN: Final = 10


def history(out: Console, one: History) -> None:
    """`history`."""
    newest = "none yet" if one.newest_epoch is None else str(one.newest_epoch)
    out.print(
        f"[bold]{escape(one.job)}[/]  {one.mode}, newest complete epoch {newest}, "
        f"generation {one.generation}"
    )
    made = table(
        "epoch#",
        "status",
        "began",
        "total ms#",
        "commit ms#",
        "rows#",
        "late#",
        "changes#",
        "state#",
        "restored#",
        "watermark",
    )
    for each in one.checkpoints:
        made.add_row(
            str(each.epoch),
            _status(each),
            when(each.started_ms if each.started_ms is not None else each.stamp_ms),
            _ms(each.total_ms),
            _ms(each.phases_ms.get("commit") or None),
            _number(each.rows),
            _number(each.late_rows or None),
            "" if each.status == "failed" else size(each.delta_bytes),
            "" if each.state_bytes is None else size(each.state_bytes),
            _number(each.restores or None),
            when(each.watermark_ms or None),
        )
    out.print(made)
    for each in one.checkpoints:
        if each.reason:
            out.print(f"[red]failed[/] {each.epoch}: {escape(each.reason)}")
    for restored in one.restores[:_SHOWN]:
        _restores(out, restored)
    for problem in one.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")
    if one.next_before is not None:
        out.print(f"older ones: --before {one.next_before}")


def _status(one: CheckpointFigures) -> str:
    colour = _COLOURS[one.status]
    said = f"{one.status}, repeated" if one.repeated and one.status == "complete" else one.status
    return f"[{colour}]{said}[/]" if colour else said


def _restores(out: Console, one: RestoreSummary) -> None:
    sources = ", ".join(f"{n} {source}" for source, n in sorted(one.by_source.items()))
    out.print(
        f"restored for epoch {one.epoch}, operator {escape(one.operator)}: "
        f"{counted(one.subtasks, 'subtask')} ({sources}), {size(one.local_bytes)} from local "
        f"disks, {size(one.durable_bytes)} from the store, at most {one.max_seconds:.1f} s"
    )


def checkpoint(out: Console, one: CheckpointFigures) -> None:
    """`history --epoch`: by operator and subtask."""
    out.print(
        f"[bold]epoch {one.epoch}[/]  {_status(one)}, generation {one.generation}, "
        f"record {one.sequence}, began {when(one.started_ms) or 'at an unknown time'}"
    )
    for operator in one.operators:
        _operator(out, operator)
    if not one.has_detail:
        out.print("Its record was cleaned: this is its summary.")


def _operator(out: Console, one: OperatorFigures) -> None:
    slowest = "" if one.slowest is None else f"; slowest {one.slowest} {escape(one.slowest_on)}"
    out.print(
        f"operator [bold]{escape(one.uid)}[/]: {counted(one.subtasks, 'subtask')}, acks after "
        f"{_ms(one.acks_ms) or '?'} ms (median {_ms(one.ack_median_ms) or '?'}, "
        f"p95 {_ms(one.ack_p95_ms) or '?'}{slowest}), commit {_ms(one.commit_ms) or '?'} ms, "
        f"{size(one.delta_bytes)} of changes, {counted(one.bases, 'base')}"
    )
    if not one.by_subtask:
        return
    made = table(
        "subtask#", "on", "start ms#", "alignment ms#", "freeze ms#", "persist ms#",
        "end to end ms#", "rows#", "changes#", "base#",
    )  # fmt: skip
    for each in one.by_subtask:
        made.add_row(
            str(each.subtask),
            escape(" on ".join(filter(None, (each.executor, each.host)))),
            _ms(each.start_delay_ms),
            _ms(each.alignment_ms),
            _ms(each.freeze_ms),
            _ms(each.persist_ms),
            _ms(each.end_to_end_ms),
            _number(each.rows),
            size(each.delta_bytes),
            size(each.base_bytes) if each.base_bytes else "",
        )
    out.print(made)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
