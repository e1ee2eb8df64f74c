"""Words and figures of a drill's report: the same in its text and on its page."""

from __future__ import annotations

from recovery.drill.report.drill_report import NOTHING_COMPARED, DrillReport, Struck
from statebackend.texts import count, seconds

__all__ = ["after", "how_it_went", "verdict_line"]


def verdict_line(report: DrillReport) -> str:
    """The verdict in a sentence."""
    verdict = report.verdict
    if verdict.exact:
        return f"exact: {count(verdict.found, 'row')}, none lost, duplicated or wrong"
    kinds = (("lost", verdict.lost), ("duplicated", verdict.duplicated), ("wrong", verdict.wrong))
    bad = ", ".join(f"{number:,} {kind}" for kind, number in kinds if number)
    found = f"{verdict.found:,} of {count(verdict.expected, 'row')}"
    if verdict.failure == NOTHING_COMPARED:
        return f"not exact: {verdict.failure}"
    if verdict.failure:
        return f"not exact: the job did not come to its end ({found}{', ' + bad if bad else ''})"
    return f"not exact: {bad or 'the results differ'} ({found})"


def after(struck: Struck) -> str:
    """Where in the job's life a fault was made."""
    return f"after epoch {struck.at_epoch}" if struck.at_epoch >= 0 else "before any epoch"


def how_it_went(struck: Struck) -> str:
    """What came of a fault, in a few words."""
    if struck.skipped:
        return f"not made: {struck.skipped}"
    if struck.recovered_s is None:
        return "no epoch after it"
    return f"next epoch after {seconds(struck.recovered_s)}"
