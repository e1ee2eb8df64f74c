"""Words and figures of a drill's report: the same in its text and on its page."""

from __future__ import annotations

from recovery.drill.report.outcome import NOTHING_COMPARED, DrillReport, Struck

__all__ = ["after", "count", "duration", "how_it_went", "seconds", "verdict_line"]


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


def count(number: int, noun: str) -> str:
    """1 row, 2,000 rows."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} " + (f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s")


def seconds(amount_s: float) -> str:
    """A span for people: 340 ms, 2.3 s."""
    return f"{1000 * amount_s:.0f} ms" if amount_s < 0.9995 else f"{amount_s:.1f} s"


def duration(amount_s: float) -> str:
    """A long span for people: 41.2 s, 5 min 3 s, 2 h 5 min."""
    if amount_s < 60:
        return seconds(amount_s)
    minutes, rest_s = divmod(round(amount_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"
