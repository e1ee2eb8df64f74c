"""The pages of jobs: from a path to HTML. Reads only; whatever comes from jobs is escaped.

/                                   the jobs
/jobs/<job>/                        how it fares
/jobs/<job>/checkpoints             all of them, some at a time; /<epoch>: one
/jobs/<job>/summary, restores, savepoints, state, settings
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

from blake3 import blake3
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recovery.inspect.history import CheckpointFigures, History
from snapshot.storage.uris import folder_name
from statebackend.errors import SettingError, StateBackendError
from statebackend.texts import count, duration, seconds, size, when
from statebackend.ui.checkpoint_detail import facts_of, milliseconds, place_text, section
from statebackend.ui.job_figures import JobLine, JobView, RunFacts, StoredFacts
from statebackend.ui.job_health import health_of, waits_for
from statebackend.ui.page_charts import Bar, bars, heat, quantile
from statebackend.ui.page_server import Answer
from statebackend.ui.summary_lines import boxes, summary_lines

__all__ = ["JobSite", "Jobs"]

_log = logging.getLogger("statebackend.ui")
TEMPLATES: Final = Path(__file__).parent / "templates"
_STATIC: Final = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_TABS: Final = (
    ("", "Overview"),
    ("checkpoints", "Checkpoints"),
    ("summary", "Summary"),
    ("restores", "Restores"),
    ("savepoints", "Savepoints"),
    ("state", "State"),
    ("settings", "Configuration"),
)
_PAGE: Final = 40  # checkpoints on a page
_FEW: Final = 10
_REFRESH_S: Final = 5
_SUMMARIES: Final = (100, 1_000, 10_000)
_GROUPS: Final = 200  # key groups of subtasks at once
_SHARES: Final[tuple[str, ...]] = ("acks", "commit")
_KINDS: Final = (
    ("acks", "until all subtasks have saved"),
    ("commit", "commit"),
    ("total", "end to end"),
    ("failed", "failed"),
)


class Jobs(Protocol):
    """The jobs that are shown."""

    @property
    def where(self) -> str:
        """The folder of all of them; empty: those of this driver."""

    def lines(self) -> list[JobLine]:
        """All of them."""

    def view(self, job: str) -> JobView | None:
        """One of them; None: there is none of that name."""


class _NotThere(Exception):
    """There is no such page."""


class JobSite:
    """Answers for paths.

    Args:
        now_ms: the wall clock.
    """

    def __init__(self, jobs: Jobs, now_ms: Callable[[], int]) -> None:
        self._jobs, self._now_ms = jobs, now_ms
        self._static = {name: (TEMPLATES / name).read_bytes() for name in _STATIC}
        self._version = blake3(b"".join(self._static.values())).hexdigest()[:12]
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            amount=lambda value: "" if value is None else f"{value:,}",
            anchor=_anchor,
            count=count,
            duration=duration,
            ms=milliseconds,
            place=_place,
            seconds=seconds,
            size=size,
            slowest=_slowest,
            unit=_unit,
            when=when,
        )
        self._pages: dict[str, Callable[[JobView, dict[str, str]], dict[str, Any]]] = {
            "": self._overview,
            "checkpoints": self._checkpoints,
            "summary": self._summary,
            "restores": self._restores,
            "savepoints": lambda view, _: {"savepoints": view.savepoints()},
            "state": self._state,
            "settings": lambda view, _: {"settings": view.settings()},
        }

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """The page at a path; of an error, a page that says it."""
        try:
            return self._answer(path, query)
        except _NotThere:
            return self._problem(
                404, f"There is no page at {path}.", "Go back to the list of jobs."
            )
        except StateBackendError as error:
            return self._problem(503, error.what, error.todo, error.code, **_tabs_at(path))
        except Exception as error:
            _log.exception("the page at %s could not be made", path)
            what = f"This page could not be made: {type(error).__name__}."
            todo = "The driver's log, logger statebackend.ui, says more."
            return self._problem(500, what, todo, **_tabs_at(path))

    def _answer(self, path: str, query: dict[str, str]) -> Answer:
        parts = [unquote(part) for part in path.split("/")[1:]]
        match parts:
            case [""]:
                return self._list()
            case ["static", name] if name in _STATIC:
                return Answer(self._static[name], _STATIC[name], keep="v" in query)
            case ["jobs", job]:
                return Answer(b"", status=303, location=_place(job))
            case ["jobs", job, "checkpoints", number] if re.fullmatch(r"\d{1,18}", number):
                return self._job_page(job, "checkpoints", "checkpoint", query | {"epoch": number})
            case ["jobs", job, name] if name in self._pages:
                return self._job_page(job, name, name or "overview", query)
        raise _NotThere

    # --- the list ------------------------------------------------------------------------------

    def _list(self) -> Answer:
        lines = self._jobs.lines()
        if len(lines) == 1 and not self._jobs.where:
            return Answer(b"", status=303, location=_place(lines[0].job))
        return self._html("jobs.html", title="Jobs", jobs=lines, where=self._jobs.where)

    def _job_page(self, job: str, tab: str, name: str, query: dict[str, str]) -> Answer:
        view = self._jobs.view(job)
        if view is None:
            raise _NotThere
        found = self._checkpoint(view, query) if name == "checkpoint" else None
        if found is None:
            found = self._pages[tab](view, query)
        title = f"{job}: {dict(_TABS)[tab]}"
        return self._html(f"{name}.html", **{**_tabs_of(job, tab), "title": title, **found})

    def _html(self, template: str, **context: Any) -> Answer:
        given = {"job": "", "refresh": 0, "now_ms": self._now_ms(), "version": self._version}
        text = self._environment.get_template(template).render({**given, **context})
        return Answer(text.encode(), status=context.get("http_status", 200))

    def _problem(self, status: int, what: str, todo: str, code: str = "", **tabs: Any) -> Answer:
        told = {"title": "Problem", "what": what, "todo": todo, "code": code, **tabs}
        return self._html("problem.html", http_status=status, **told)

    # --- one job -------------------------------------------------------------------------------

    def _overview(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        facts, history = view.facts(), view.history(None, _PAGE)
        moves = view.is_running
        if isinstance(facts, RunFacts):
            moves = facts.active or facts.starting
            if facts.durable_epoch is None:  # of this start
                facts = replace(facts, durable_epoch=history.newest_epoch)
        health = health_of(facts, _usual_ms(history.checkpoints))
        problems = list(history.problems)
        waiting: list[tuple[str, str]] = []
        if isinstance(facts, StoredFacts):
            problems = [*facts.problems, *problems]
        else:
            waiting = [(one.operator, waits_for(one)) for one in facts.waiting if one.subtasks]
        return {
            **self._drawn(view, history.checkpoints),
            "health": health,
            "problems": problems,
            "facts": _overview_facts(view, facts, history),
            "waiting": waiting,
            "epoch": None if isinstance(facts, StoredFacts) else facts.epoch,
            "checkpoints": history.checkpoints[:_FEW],
            "mode": history.mode,
            "restored": _restored(history),
            "refresh": _REFRESH_S if moves else 0,
        }

    def _drawn(self, view: JobView, checkpoints: Sequence[CheckpointFigures]) -> dict[str, Any]:
        """A chart of checkpoints, the oldest left."""
        columns = [_column(one, _place(view.job)) for one in reversed(checkpoints)]
        made, top = bars(columns)
        drawn = {kind for parts, _, _ in columns for kind in parts}
        kinds = [pair for pair in _KINDS if pair[0] in drawn]
        shown: list[Bar] = made if drawn else []
        return {"bars": shown, "top": top, "kinds": kinds}

    def _checkpoints(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        before = _number(query, "before")
        if (around := _number(query, "around")) is not None:
            before = around + 1 + _PAGE // 2
        history = view.history(before, _PAGE)
        return {
            **self._drawn(view, history.checkpoints),
            "checkpoints": history.checkpoints,
            "mode": history.mode,
            "problems": history.problems,
            "before": before,
            "newer": None if before is None else before + _PAGE,
            "older": history.next_before,
            "refresh": _REFRESH_S if view.is_running and before is None else 0,
        }

    def _checkpoint(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        one = view.checkpoint(int(query["epoch"]))
        if one is None:
            raise _NotThere
        sort, begin = query.get("sort", "took"), _number(query, "from") or 0
        chosen = query.get("operator")
        sections = []
        for operator in one.operators:
            own = chosen is None or chosen == operator.uid
            made = section(
                operator,
                sort if own else "took",
                begin if own else 0,
                tells_begins=one.mode == "micro-batch",
            )
            made.query = f"operator={quote(operator.uid, safe='')}&"
            sections.append(made)
        return {
            "one": one,
            "facts": [("began", when(one.started_ms or one.stamp_ms)), *facts_of(one)],
            "parts_of": sections,
            "sort": sort,
            "has_detail": one.has_detail or any(part.rows for part in sections),
            "refresh": _REFRESH_S if view.is_running and one.status == "running" else 0,
        }

    def _summary(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        chosen = _number(query, "of") or _SUMMARIES[0]
        chosen = chosen if chosen in _SUMMARIES else _SUMMARIES[0]
        found = view.history(None, chosen).checkpoints
        complete = [one for one in found if one.status == "complete"]
        lines = summary_lines(complete)
        return {
            "number": len(complete),
            "failed": sum(one.status == "failed" for one in found),
            "lines": [(line, boxes(line)) for line in lines],
            "sizes": _SUMMARIES,
            "chosen": chosen,
        }

    def _restores(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        before = _number(query, "before")
        history = view.history(before, _SUMMARIES[0])
        return {
            "restores": history.restores,
            "looked_at": len(history.checkpoints),
            "before": before,
            "older": history.next_before,
            "takeovers": view.takeovers(),
        }

    def _state(self, view: JobView, query: dict[str, str]) -> dict[str, Any]:
        states = view.states()
        begin = _number(query, "groups") or 0
        operators = []
        for one in view.operators():
            groups = [
                (number, *pair)
                for number, pair in enumerate(one.key_groups[begin : begin + _GROUPS], begin)
            ]
            more = begin + _GROUPS if begin + _GROUPS < len(one.key_groups) else 0
            known = [float(amount) for amount in one.subtask_bytes]
            operators.append(
                {
                    **{name: getattr(one, name) for name in _OPERATOR_FIELDS},
                    "states": [state for state in states if state.operator == one.uid],
                    "groups": groups,
                    "more_groups": more,
                    "heat": heat(known) if any(known) and len(known) > 1 else None,
                    "values": " ".join(size(int(amount)).replace(" ", "_") for amount in known),
                }
            )
        asked = {"of": query.get("of", ""), "key": query.get("key", "")}
        found = {"answer": None, "refusal": ""}
        if asked["of"] and asked["key"]:
            found = _looked_up(view, asked["of"].replace("\r\n", "\n"), asked["key"])
        lookups = [state for state in states if state.looked_up]
        return {"operators": operators, "lookups": lookups, "asked": asked, **found}


_OPERATOR_FIELDS: Final = (
    "uid",
    "parallelism",
    "max_parallelism",
    "first_epoch",
    "state_bytes",
    "dropped",
)


def _looked_up(view: JobView, of: str, key: str) -> dict[str, Any]:
    operator, _, state = of.partition("\n")
    try:
        return {"answer": view.lookup(operator, state, _key(key)), "refusal": ""}
    except StateBackendError as error:
        return {"answer": None, "refusal": f"{error.what} {error.todo}"}


def _key(text: str) -> Any:
    """A key as JSON; what is none is a text.

    Raises:
        SettingError: it is an object, or a list of lists.
    """
    try:
        key = json.loads(text)
    except ValueError:
        return text
    parts = key if isinstance(key, list) else [key]
    if any(isinstance(part, list | dict) for part in parts):
        raise SettingError(
            f"The key {text[:80]!r} is no value.", todo="Give a value, or a JSON list of values."
        )
    return tuple(key) if isinstance(key, list) else key


def _tabs_of(job: str, tab: str) -> dict[str, Any]:
    return {"job": job, "root": _place(job), "tab": tab, "tabs": _TABS}


def _tabs_at(path: str) -> dict[str, Any]:
    """Those of the job that a path is of: whoever meets a problem there looks elsewhere next."""
    parts = [unquote(part) for part in path.split("/")[1:]]
    return _tabs_of(parts[1], parts[2]) if parts[0] == "jobs" and len(parts) > 2 else {}


def _place(job: str) -> str:
    """The path of a job's pages."""
    return f"/jobs/{folder_name(job)}/"


def _anchor(uid: str) -> str:
    return "operator-" + quote(uid, safe="")


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name, "").strip()
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _slowest(one: CheckpointFigures) -> str:
    """The slowest subtask of the operator that was complete last, and its executor."""
    known = [part for part in one.operators if part.slowest is not None]
    if not known:
        return ""
    last = max(known, key=lambda part: part.acks_ms or 0.0)
    executor = place_text(last.slowest_on).partition(" on ")[0]  # the host: on its own page
    where = f" ({executor})" if executor else ""
    return f"{last.uid}/{last.slowest}{where}"


def _column(one: CheckpointFigures, root: str) -> tuple[dict[str, float], str, str]:
    """A checkpoint in a chart of columns: its parts, its title, its link."""
    total_ms = one.total_ms or 0.0
    parts = {kind: one.phases_ms[kind] for kind in _SHARES if kind in one.phases_ms}
    if one.status == "failed":
        parts = {"failed": total_ms}
    title = f"checkpoint {one.epoch}, {one.status}: {milliseconds(one.total_ms) or 'not yet'}"
    return parts or {"total": total_ms}, title, f"{root}checkpoints/{one.epoch}"


def _unit(value: float, unit: str) -> str:
    if unit == "ms":
        return milliseconds(value)
    return size(int(value)) if unit == "bytes" else f"{value:,.0f}"


def _usual_ms(checkpoints: Sequence[CheckpointFigures]) -> float | None:
    known = [one.total_ms for one in checkpoints if one.status == "complete" and one.total_ms]
    return quantile(sorted(known), 0.5) if known else None


def _overview_facts(
    view: JobView, facts: RunFacts | StoredFacts, history: History
) -> list[tuple[str, str]]:
    newest = next((one for one in history.checkpoints if one.status == "complete"), None)
    shown = [
        ("kind", "continuous" if history.mode == "continuous" else "micro-batches"),
        ("newest durable checkpoint", _or_none(facts.durable_epoch)),
        ("driver generation", str(history.generation)),
    ]
    usual = _usual_ms(history.checkpoints)
    if usual is not None:
        shown.append(("median end to end", milliseconds(usual)))
    if newest is not None:
        if newest.state_bytes is not None:
            shown.append(("state", size(newest.state_bytes)))
        if newest.watermark_ms is not None:
            shown.append(("watermark", when(newest.watermark_ms)))
        if newest.rows is not None:
            shown.append(("rows in the newest", f"{newest.rows:,}"))
    if isinstance(facts, RunFacts) and facts.continuous:
        shown.append(("restarts", str(facts.restarts)))
    return [*shown, ("folder", view.uri)]


def _or_none(number: int | None) -> str:
    return "none" if number is None else str(number)


def _restored(history: History) -> list[str]:
    """What the newest restores were, in sentences."""
    newest: dict[str, str] = {}
    for one in history.restores:
        sources = ", ".join(
            f"{number:,} {source}" for source, number in sorted(one.by_source.items())
        )
        where = f"{one.operator}: {count(one.subtasks, 'subtask')} at checkpoint {one.epoch}"
        said = (
            f"{where} ({sources}), {size(one.local_bytes)} from local disks, "
            f"{size(one.durable_bytes)} from the store, at most {seconds(one.max_seconds)}."
        )
        if set(one.by_source) == {"empty"}:
            said = f"{where} began without state: the operator was new."
        newest.setdefault(one.operator, said)
    return list(newest.values())
