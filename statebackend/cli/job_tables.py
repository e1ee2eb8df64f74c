"""Tables and texts in which the commands about jobs show their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from recovery.inspect.describe import BaseInfo, JobDescription, OperatorInfo
from recovery.inspect.job_list import JobSummary
from recovery.inspect.verify import VerifyReport
from snapshot.retention.garbage_collection import CleanReport, Tally
from statebackend.cli.console_output import counted, table
from statebackend.cli.doctor import Check
from statebackend.errors import StateBackendError
from statebackend.texts import size, when

__all__ = ["checks", "cleaning", "description", "jobs", "verification"]

_KEY: Final = ""  # its schema is kept beside the states', under a name no state can have
_SHOWN: Final = 10
_MARKS: Final = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


def jobs(out: Console, uri: str, found: Sequence[JobSummary]) -> None:
    """`list`."""
    if not found:
        out.print(f"There is no job under {escape(uri)}.")
        return
    made = table("job", "epoch#", "generation#", "objects#", "size#", "last written", "by")
    for one in found:
        made.add_row(
            escape(one.job),
            "none" if one.epoch is None else str(one.epoch),
            str(one.generation),
            str(one.objects),
            size(one.size_bytes),
            when(one.modified_ms),
            escape(one.writer),
        )
    out.print(made)
    for one in found:
        if one.problem:
            out.print(f"[red]{escape(one.job)}[/]: {escape(one.problem)}")


def description(out: Console, one: JobDescription) -> None:
    """`describe`."""
    out.print(f"[bold]{escape(one.job)}[/]  {escape(one.uri)}")
    out.print(f"  id {escape(one.job_id)}, query {escape(one.query_id) or 'none yet'}")
    out.print(
        f"  generation {one.generation}, last record {one.sequence} by {escape(one.writer)} "
        f"{when(one.stamp_ms)}"
    )
    out.print(
        f"  {counted(one.records, 'record')}; needed from {one.oldest_needed} on; "
        f"cleaned below {one.cleaned_below}"
    )
    amounts = (
        f"{kind} {one.objects[kind]} ({size(one.size_bytes[kind])})"
        for kind in one.objects
        if one.objects[kind]
    )
    out.print(f"  objects: {', '.join(amounts)}")
    for operator in one.operators:
        _operator(out, operator)
    claims = table("claim#", "generation#", "by", "run")
    for claim in one.claims[-_SHOWN:]:
        claims.add_row(
            str(claim.sequence), str(claim.generation), escape(claim.writer), escape(claim.run)
        )
    out.print(f"  {counted(len(one.claims), 'claim')}" + (", the newest:" if one.claims else ""))
    out.print(claims)
    for problem in one.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")


def _operator(out: Console, one: OperatorInfo) -> None:
    dropped = ", [yellow]dropped by the last run[/]" if one.dropped else ""
    out.print(f"  operator [bold]{escape(one.uid)}[/]{dropped}")
    out.print(
        f"    parallelism {one.parallelism} of at most {one.max_parallelism} (key groups); "
        f"first epoch {one.first_epoch}, complete epochs {_ranges(one.epochs)}"
    )
    if key := one.schemas.get(_KEY):
        out.print(f"    key {escape(_ddl_of_key(key))}")
    for name, number in sorted(one.states.items()):
        declared = _declared(one.schemas.get(name, ""))
        out.print(f"    state {escape(name)} (id {number}) {escape(declared)}")
    if one.bases:
        out.print(f"    bases of {counted(len(one.bases), 'subtask')}: {_bases(one.bases)}")


def _ddl_of_key(text: str) -> str:
    from statebackend.schema.types import ddl_of  # imports PySpark

    with contextlib.suppress(StateBackendError):  # damaged: as it stands
        return ddl_of(text) or "none"
    return text


def _declared(text: str) -> str:
    """The kind and the schema of a state, for people."""
    from statebackend.operators.declared_states import StateDeclaration  # imports PySpark
    from statebackend.schema.types import ddl_of

    if not text:
        return ""
    try:
        state = StateDeclaration.from_json(text)
        value = ddl_of(state.value_schema)
        key = f"{ddl_of(state.key_schema)} -> " if state.key_schema else ""
    except StateBackendError:  # damaged: as it stands
        return text
    ttl = f", ttl {state.ttl_ms} ms" if isinstance(state.ttl_ms, int) else ""
    return f"{state.kind}: {key}{value}{ttl}"


def _bases(bases: Sequence[BaseInfo]) -> str:
    kinds = sorted({base.kind for base in bases})
    deltas = max(base.deltas for base in bases)
    return (
        f"{size(sum(base.size_bytes for base in bases))} as {' and '.join(kinds)}, of epochs "
        f"{_ranges(sorted({base.epoch for base in bases}))}; up to {counted(deltas, 'delta')} on "
        f"top, {size(sum(base.delta_bytes for base in bases))} in all"
    )


def verification(out: Console, report: VerifyReport) -> None:
    """`verify`."""
    verdict = "[green]ok[/]" if report.ok else f"[red]{counted(len(report.findings), 'finding')}[/]"
    out.print(
        f"[bold]{escape(report.job)}[/]  {verdict}; read {counted(report.records, 'record')}, "
        f"{counted(report.slices, 'slice')}, {counted(report.files, 'file')} of bases, "
        f"{size(report.size_bytes)}"
    )
    when = "" if report.startable else ", once the records below are put back"
    for uid, epochs in report.restorable.items():
        out.print(f"  operator {escape(uid)} can be restored to epochs {_ranges(epochs)}{when}")
    for finding in report.findings:
        out.print(f"[red]{finding.code}[/] {escape(finding.object)}")
        out.print(f"  {escape(finding.problem)}")
        out.print(f"  {escape(finding.means)}")


def cleaning(out: Console, job: str, report: CleanReport) -> None:
    """`gc`."""
    verb = "would delete" if report.dry_run else "deleted"
    out.print(f"[bold]{escape(job)}[/]  {verb} {_amount(report.removed)}")
    for kind, tally in report.removed.items():
        out.print(f"  {kind}: {counted(tally.objects, 'object')}, {size(tally.size_bytes)}")
    out.print(f"  stays: {_amount(report.kept)}")
    if report.young:
        out.print(f"  not old enough yet: {_amount(report.young)}")
    if report.waiting:
        out.print(f"  stays until there is enough for the history: {_amount(report.waiting)}")
    if report.drivers:
        out.print(
            f"  left to the job's driver: {_amount(report.drivers)} (it may still name them; what "
            "it does not need, it deletes itself, or the next start does)"
        )
    if report.files_unknown:
        out.print("  [yellow]a file index does not read, so no file of a base is deleted[/]")
    for title, names in (("records that do not read", report.unknown), ("foreign", report.foreign)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            out.print(f"  {title}: {escape(', '.join(names[:_SHOWN]))}{more}")
    if report.dry_run and report.removed:
        out.print("  nothing was deleted: say --yes to delete")


def checks(out: Console, found: Sequence[Check]) -> None:
    """`doctor`."""
    for check in found:
        out.print(f"{_MARKS[check.status]} {check.name}: {escape(check.detail)}")
        if check.todo:
            out.print(f"       {escape(check.todo)}")


def _amount(tallies: Mapping[str, Tally]) -> str:
    objects = sum(tally.objects for tally in tallies.values())
    if not objects:
        return "nothing"
    return (
        f"{counted(objects, 'object')}, {size(sum(tally.size_bytes for tally in tallies.values()))}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """[3, 4, 5, 9] is "3 to 5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = (f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ", ".join(said) or "none"
