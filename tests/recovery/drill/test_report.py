"""What a drill's report says: as text, as JSON, on the page and over time."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from recovery.drill.report.drill_report import (
    NOTHING_COMPARED,
    DrillReport,
    DriverLife,
    EpochDone,
    Struck,
    Verdict,
    json_text,
)
from recovery.drill.report.html_page import write_html
from recovery.drill.report.text_report import as_text
from recovery.drill.report.timeline import timeline
from recovery.drill.report.wording import verdict_line
from statebackend.errors import EnvironmentMissingError
from statebackend.texts import seconds
from tests.recovery.drill.reports import LOSSES, full_report, recovery

NEVER_RAN = full_report(
    duration_s=0.0,
    verdict=Verdict(
        exact=False,
        expected=10,
        found=0,
        lost=10,
        duplicated=0,
        wrong=0,
        failure="no driver came up\nsee driver.log",
    ),
    faults=[],
    drivers=[],
    epochs=[],
    recoveries=[],
    requests=[],
)


def lines_of(report: DrillReport, title: str) -> list[str]:
    """The lines below a title of the text, up to the next empty one."""
    lines = as_text(report).splitlines()
    start = lines.index(title) + 1
    return [line.strip() for line in lines[start : lines.index("", start)]]


# --- text -----------------------------------------------------------------------------------------


def test_the_text_begins_with_the_verdict_and_ends_with_how_to_replay() -> None:
    lines = as_text(full_report()).splitlines()
    assert lines[0] == "Exact: 4,043 rows, none lost, duplicated or wrong."
    assert lines[-1] == ("Replay: statebackend drill run totals --faults executor-killed --seed 77")


def test_a_drill_run_from_python_is_replayed_by_its_seed() -> None:
    assert as_text(full_report(command="")).endswith("Replay: run_drill(..., seed=77)\n")


def test_rows_that_differ_are_counted_in_the_verdict_and_shown() -> None:
    text = as_text(full_report(verdict=LOSSES))
    assert text.startswith("Not exact: 2 lost, 1 duplicated (4,042 of 4,043 rows).")
    assert "  duplicated ('bob', 1)\n" in text


def test_a_job_that_did_not_come_to_its_end_is_told_with_the_reason() -> None:
    text = as_text(NEVER_RAN)
    assert text.startswith("Not exact: the job did not come to its end (0 of 10 rows, 10 lost).")
    assert "\n  no driver came up\n  see driver.log\n" in text


def test_each_fault_is_a_line_with_time_epoch_target_and_what_came_of_it() -> None:
    killed, down, full = (re.split(r"  +", line) for line in lines_of(full_report(), "Faults"))
    assert killed == [
        "executor-killed",
        "11.0 s",
        "after epoch 3",
        "next epoch after 2.3 s",
        "executor 4711 on 127.0.0.2",
    ]
    assert down[3] == "for 3.0 s"
    assert full[-1] == "not made: there is no compiler"


def test_a_fault_without_an_epoch_before_or_after_it_says_so() -> None:
    lonely = Struck(fault="driver-killed", at_s=1.0, at_epoch=-1)
    (line,) = lines_of(full_report(faults=[lonely]), "Faults")
    assert re.split(r"  +", line)[2:] == ["before any epoch", "no epoch after it"]


def test_each_driver_is_a_line_with_its_end_and_the_first_line_of_its_error() -> None:
    failed = DriverLife(
        number=3,
        started_s=9.0,
        ready_s=None,
        ended_s=12.5,
        ending="failed",
        error="SB4001 fenced\nat x",
    )
    assert lines_of(full_report(drivers=[failed]), "Drivers") == [
        "3  9.0 s  never ready  failed at 12.5 s  SB4001 fenced"
    ]


def test_recoveries_are_summed_up_by_source_and_told_by_subtask() -> None:
    lines = lines_of(full_report(), "Recoveries")
    assert lines[0] == (
        "durable: 4, median 170 ms, longest 320 ms, 0 B local, 168.0 KiB durable in 12 reads"
    )
    assert re.split(r"  +", lines[-1]) == [
        "totals 3",
        "29.4 s",
        "driver 2",
        "durable",
        "320 ms",
        "0 B local",
        "42.0 KiB in 3 reads",
        "the local copy is gone",
    ]
    assert not any(line.startswith("totals") and "empty" in line for line in lines)


def test_of_very_many_recoveries_the_slowest_are_told_in_order_of_time() -> None:
    many = [recovery(n % 7, "local", at_s=100.0 - n) for n in range(70)]
    lines = lines_of(full_report(recoveries=many), "Recoveries")[1:]
    assert lines[-1] == "and 46 quicker ones: the JSON report has all"
    times_s = [float(line.split()[2]) for line in lines[:-1]]
    assert times_s == sorted(times_s)
    assert {line.split()[1] for line in lines[:-1]} == {"4", "5", "6"}


def test_requests_are_told_by_verb_and_folder() -> None:
    assert [line.split("  ") for line in lines_of(full_report(), "Requests")] == [
        ["PUT log", "1,300", "7 faulted", "2.0 KiB in", "0 B out"]
    ]


@pytest.mark.parametrize(
    ("amount_s", "text"), [(0.0, "0 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (61.0, "61.0 s")]
)
def test_spans_are_told_in_the_unit_that_fits(amount_s: float, text: str) -> None:
    assert seconds(amount_s) == text


def test_results_that_differ_in_no_counted_way_are_not_told_as_exact() -> None:
    odd = Verdict(exact=False, expected=1, found=1, lost=0, duplicated=0, wrong=0)
    assert verdict_line(full_report(verdict=odd)).startswith("not exact: the results differ")


def test_a_drill_that_compared_nothing_is_not_told_as_exact() -> None:
    nothing = Verdict(
        exact=False, expected=0, found=0, lost=0, duplicated=0, wrong=0, failure=NOTHING_COMPARED
    )
    text = as_text(full_report(verdict=nothing))
    assert text.startswith("Not exact: nothing was compared: the truth and the output have no rows")
    assert text.count("nothing was compared") == 1


# --- JSON -----------------------------------------------------------------------------------------


def test_the_json_is_read_back_as_the_same_report() -> None:
    report = full_report(verdict=LOSSES)
    assert msgspec.json.decode(json_text(report), type=DrillReport) == report
    assert json_text(report).startswith('{\n  "version": 1,')


# --- which faults were made -----------------------------------------------------------------------


def test_a_fault_that_was_never_made_is_named_with_its_reason() -> None:
    asked = ["executor-killed", "disk-full", "clock-jumps"]
    report = full_report(asked=asked)
    assert report.not_struck == {
        "disk-full": "there is no compiler",
        "clock-jumps": "the job came to its end before it",
    }
    assert (report.verdict.exact, report.exact) == (True, False)


def test_a_drill_is_exact_if_its_results_are_and_every_fault_was_made() -> None:
    assert full_report(asked=["executor-killed", "store-down"]).exact
    assert not full_report(asked=["executor-killed"], verdict=LOSSES).exact


def test_a_fault_that_was_asked_for_twice_must_be_made_twice() -> None:
    once = Struck(fault="disk-full", at_s=1.0, at_epoch=0, recovered_s=1.0)
    missed = Struck(fault="disk-full", at_s=5.0, at_epoch=2, skipped="no copy left")
    asked = ["disk-full", "disk-full"]
    assert full_report(faults=[once, once], asked=asked).not_struck == {}
    assert full_report(faults=[once, missed], asked=asked).not_struck == {
        "disk-full": "no copy left (1 of 2)"
    }
    assert full_report(faults=[once], asked=asked).not_struck == {
        "disk-full": "the job came to its end before it (1 of 2)"
    }


def test_a_fault_that_was_made_once_counts_though_it_was_skipped_before() -> None:
    tries = [
        Struck(fault="disk-full", at_s=1.0, at_epoch=0, skipped="no copy yet"),
        Struck(fault="disk-full", at_s=5.0, at_epoch=2),
        Struck(fault="disk-full", at_s=9.0, at_epoch=4, skipped="no copy left"),
    ]
    assert full_report(faults=tries, asked=["disk-full"]).not_struck == {}


# --- over time ------------------------------------------------------------------------------------


def test_every_mark_stands_within_the_width() -> None:
    late = Struck(fault="x", at_s=39.0, at_epoch=1, until_s=60.0, recovered_s=900.0)
    drawn = timeline(full_report(faults=[late]))
    marks = [mark for lane in drawn.lanes for row in lane.rows for mark in row.marks]
    bars = [bar for lane in drawn.lanes for row in lane.rows for bar in row.bars]
    assert len(marks) == 13 + 2 + 1 + 10
    assert all(0 <= mark.x <= 100 for mark in marks)
    assert all(bar.x >= 0 and bar.x + bar.width <= 100 for bar in bars)


def test_marks_stand_in_order_of_time_on_the_axis_of_the_ticks() -> None:
    drawn = timeline(full_report())
    epochs = next(lane for lane in drawn.lanes if lane.name == "Epochs").rows[0].marks
    assert [mark.x for mark in epochs] == sorted(mark.x for mark in epochs)
    places = {text: x for x, text in drawn.ticks}
    assert list(places) == ["0 s", "10 s", "20 s", "30 s", "40 s"]
    killed = next(lane for lane in drawn.lanes if lane.name == "Drivers").rows[0].marks[0]
    assert places["20 s"] < killed.x < places["30 s"]


@pytest.mark.parametrize("duration_s", [0.0, 0.004, 3.7, 59.0, 3600.0])
def test_the_axis_has_a_few_round_ticks(duration_s: float) -> None:
    report = msgspec.structs.replace(NEVER_RAN, duration_s=duration_s)
    ticks = timeline(report).ticks
    assert 1 <= len(ticks) <= 9
    assert len({text for _, text in ticks}) == len(ticks)


def test_drivers_that_lived_at_once_have_rows_of_their_own() -> None:
    lives = [
        DriverLife(number=1, started_s=0.0, ready_s=4.0, ended_s=20.0, ending="failed"),
        DriverLife(number=2, started_s=10.0, ready_s=14.0, ended_s=None, ending="running"),
        DriverLife(number=3, started_s=21.0, ready_s=None, ended_s=22.0, ending="killed"),
    ]
    lanes = timeline(full_report(drivers=lives)).lanes
    rows = next(lane for lane in lanes if lane.name == "Drivers").rows
    assert [[bar.title.split(",")[0] for bar in row.bars] for row in rows] == [
        [
            "driver 1 starting: 4.0 s",
            "driver 1 running: 16.0 s",
            "driver 3 starting: 1.0 s",
        ],
        ["driver 2 starting: 4.0 s", "driver 2 running: 27.2 s"],
    ]


def test_sources_and_faults_that_could_not_be_made_have_shapes_of_their_own() -> None:
    lanes = {lane.name: lane for lane in timeline(full_report()).lanes}
    shapes = {mark.shape for row in lanes["Recoveries"].rows for mark in row.marks}
    assert shapes == {"empty", "local", "mixed", "durable"}
    assert [row.marks[0].shape for row in lanes["Faults"].rows] == ["struck", "struck", "skipped"]


def test_very_many_subtasks_share_the_row_of_their_operator() -> None:
    many = [recovery(n, "local", at_s=5.0, operator=op) for n in range(64) for op in ("a", "b")]
    lanes = timeline(full_report(recoveries=many)).lanes
    rows = next(lane for lane in lanes if lane.name == "Recoveries").rows
    assert [(row.label, len(row.marks)) for row in rows] == [("a", 64), ("b", 64)]


def test_epochs_have_their_numbers_where_there_is_room() -> None:
    times_s = [1.0, 1.1, 1.2, 20.0, 39.0, 39.1]
    few = [EpochDone(epoch=n, at_s=at_s, driver=1) for n, at_s in enumerate(times_s)]
    marks = timeline(full_report(epochs=few)).lanes[0].rows[0].marks
    assert [mark.label for mark in marks] == ["0", "", "", "3", "4", ""]
    many = [EpochDone(epoch=n, at_s=n / 10, driver=1) for n in range(400)]
    marks = timeline(full_report(epochs=many)).lanes[0].rows[0].marks
    places = [mark.x for mark in marks if mark.label]
    assert 8 <= len(places) <= 14
    assert all(right - left >= 7 for left, right in pairwise(places))


# --- the page -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A page taken apart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.setdefault(self.open[-1], []).append(" ".join(data.split()))

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


@pytest.fixture
def page_path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_the_page_needs_no_other_file_and_no_network(page_path: Path) -> None:
    write_html(full_report(), page_path)
    page = Page(page_path)
    named = {name for _, attributes in page.tags for name in attributes}
    assert not named & {"src", "href", "srcset", "xlink:href", "action"}
    assert page.count("script") == page.count("link") == 0
    assert not re.search(r"@import|url\(|https?:", page.source)


def test_the_page_is_well_formed_and_has_the_verdict_on_top(page_path: Path) -> None:
    write_html(full_report(), page_path)
    page = Page(page_path)
    assert page.open == []
    assert page.texts["h1"] == ["✓ Exact: 4,043 rows, none lost, duplicated or wrong"]
    assert "prefers-color-scheme: dark" in page.source


def test_every_mark_of_the_page_says_what_it_is(page_path: Path) -> None:
    write_html(full_report(), page_path)
    titles = Page(page_path).texts["title"][1:]  # the first is the page's own
    assert len(titles) == 13 + 4 + 2 + (2 + 1) + 3 + 10
    assert "store-down: lasted 3.0 s" in titles
    killed = "executor-killed at 11.0 s, after epoch 3, executor 4711 on 127.0.0.2"
    assert f"{killed}: next epoch after 2.3 s" in titles


def test_the_tables_of_the_page_have_what_the_timeline_shows(page_path: Path) -> None:
    write_html(full_report(), page_path)
    page = Page(page_path)
    assert page.count("table") == 4
    assert page.count("tr") == (1 + 3) + (1 + 2) + (1 + 10) + (1 + 1)
    assert "not made: there is no compiler" in page.texts["td"]


def test_what_jobs_say_is_escaped_on_the_page(page_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    life = DriverLife(
        number=1, started_s=0.0, ready_s=1.0, ended_s=2.0, ending="failed", error=evil
    )
    struck = Struck(fault=evil, at_s=1.0, at_epoch=0, target=evil, until_s=2.0)
    report = full_report(
        job=evil,
        command=evil,
        verdict=msgspec.structs.replace(LOSSES, failure=evil),
        drivers=[life],
        faults=[struck],
        recoveries=[recovery(0, "local", at_s=1.0, operator=evil)],
        warnings=[evil],
    )
    write_html(report, page_path)
    page = Page(page_path)
    assert page.count("script") == 0
    assert sum(evil in text for texts in page.texts.values() for text in texts) >= 8


def test_a_drill_that_never_ran_has_a_page_too(page_path: Path) -> None:
    write_html(NEVER_RAN, page_path)
    page = Page(page_path)
    assert page.texts["h1"][0].startswith("✗ Not exact: the job did not come to its end")
    assert "no driver came up see driver.log" in page.texts["pre"]


def test_without_jinja2_the_page_says_what_to_install(
    page_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EnvironmentMissingError, match=r"install '\.\[drill\]"):
        write_html(full_report(), page_path)
    assert not page_path.exists()
