"""What the pages of a job show, and that nothing of a job is taken for HTML."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest

from bench.page_jobs import NOW_MS, MadeJob, MadeJobs
from recovery.inspect.history import CheckpointFigures, OperatorFigures, SubtaskFigures
from statebackend.errors import StoreUnreachableError
from statebackend.ui.checkpoint_detail import section
from statebackend.ui.job_figures import LookedUpValue, RunFacts, StoredFacts
from statebackend.ui.job_pages import JobSite
from statebackend.ui.page_charts import heat

TABS = ("", "checkpoints", "summary", "restores", "savepoints", "state", "settings")
NASTY = '<script>alert("x")</script>&\'"'


def site(*jobs: MadeJob) -> JobSite:
    return JobSite(MadeJobs(list(jobs)), lambda: NOW_MS)


def page(job: MadeJob, path: str, status: int = 200, **query: str) -> str:
    found = site(job).answer(f"/jobs/{quote(job.job, safe='')}/{path}", query)
    assert found.status == status, found.body.decode()
    return found.body.decode()


class Tags(HTMLParser):
    """The tags of a page, and what its attributes lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.styles = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "action"):
                self.links.append(str(value))
            self.styles += name == "style" or name.startswith("on")


@pytest.mark.parametrize("path", [*TABS, "checkpoints/12", "checkpoints/20"])
@pytest.mark.parametrize("mode", ["micro-batch", "continuous"])
def test_a_page_asks_no_other_server_and_has_nothing_that_its_policy_forbids(
    path: str, mode: Any
) -> None:
    found = Tags(page(MadeJob("clicks", 3, 20, mode=mode), path))
    assert [one for one in found.links if not re.match(r"[/?#](?!/)", one)] == []
    assert found.styles == 0
    assert found.tags.count("script") == 1
    assert "style" not in found.tags


@pytest.mark.parametrize("path", [*TABS, "checkpoints/12"])
def test_a_job_named_like_a_script_is_text(path: str) -> None:
    text = page(MadeJob(NASTY, 3, 20), path)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert Tags(text).tags.count("script") == 1


def test_what_is_looked_up_is_text() -> None:
    @dataclass(frozen=True)
    class Holds(MadeJob):
        def lookup(self, operator: str, state: str, key: Any) -> LookedUpValue:
            assert (operator, state, key) == ("counter", "count", NASTY)
            return LookedUpValue(found=True, text=NASTY, where=NASTY)

    text = page(Holds("clicks"), "state", of="counter\ncount", key=NASTY)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") == 3  # the key, where it was found, the value


@pytest.mark.parametrize(
    ("typed", "key"), [("ann", "ann"), ("7", 7), ('"7"', "7"), ('["ann", 7]', ("ann", 7))]
)
def test_a_key_is_json_or_a_text(typed: str, key: Any) -> None:
    @dataclass(frozen=True)
    class Holds(MadeJob):
        def lookup(self, operator: str, state: str, asked: Any) -> LookedUpValue:
            return LookedUpValue(found=True, text=repr(asked), where="here")

    text = page(Holds("clicks"), "state", of="counter\ncount", key=typed)
    shown = repr(key).replace("'", "&#39;").replace('"', "&#34;")
    assert f"<pre>{shown}</pre>" in text


def test_the_slow_subtask_stands_first_and_is_named_with_its_host() -> None:
    text = page(MadeJob("wide", 1_000, 200, slow=613), "checkpoints/199")
    assert "Skewed: subtask 613 (executor 5 on 10.0.3.15) took" in text
    assert re.findall(r'<tr(?: class="(\w*)")?><td class="number">(\d+)</td>', text)[0] == (
        "slow",
        "613",
    )
    assert len(re.findall(r'<tr(?: class="\w*")?><td class="number">', text)) == 25
    assert len(text) < 100_000


def test_one_slow_subtask_stands_out_among_many_that_took_a_little_longer() -> None:
    values = [39.0] * 800 + [300.0] * 199 + [3_300.0]
    drawn = dict(heat(values).paths)
    assert drawn[5].count("M") == 1
    assert max(set(drawn) - {5}) == 1
    assert [level for level, _ in heat([40.0, 41.0, 39.0, 60.0]).paths] == [0]  # no skew


@pytest.mark.parametrize(
    ("phase", "rows", "skewed"),
    [("restore", 1_000, False), ("process", 0, False), ("process", 1_000, True)],
)
def test_a_batch_is_skewed_by_neither_its_start_nor_work_without_rows(
    phase: str, rows: int, skewed: bool
) -> None:
    timings = {"restore": 40.0, "process": 40.0}
    parts = [
        SubtaskFigures(
            subtask=n,
            end_to_end_ms=290.0 if n == 0 else 80.0,
            timings_ms={**timings, phase: 250.0} if n == 0 else timings,
            rows=rows,
        )
        for n in range(3)
    ]
    made = section(OperatorFigures(uid="op", sequence=1, subtasks=3, by_subtask=parts), "took", 0)
    assert made.skewed is skewed
    head = "Skewed: subtask 0 took" if skewed else "The slowest was subtask 0, with"
    where = {"restore": "open or restore"}.get(phase, phase)
    assert made.skew == (f"{head} 290 ms, 3.6 times the median (80 ms). It lost 210 ms in {where}.")


def test_a_subtask_that_waited_long_for_a_core_is_not_the_slow_one() -> None:
    slow = SubtaskFigures(
        subtask=0, end_to_end_ms=3_000.0, start_delay_ms=0.0, timings_ms={"process": 3_000.0}
    )
    later = [
        SubtaskFigures(
            subtask=n,
            end_to_end_ms=3_000.0 * n + 40.0,
            start_delay_ms=3_000.0 * n,
            timings_ms={"process": 40.0},
        )
        for n in range(1, 9)
    ]
    operator = OperatorFigures(uid="op", sequence=1, subtasks=9, by_subtask=[slow, *later])
    made = section(operator, "took", 0, tells_begins=True)
    assert made.skew.startswith("Skewed: subtask 0 took 3.0 s")
    assert "waited longer for a free core: 12.0 s at the median" in made.skew
    assert made.rows[0].subtask == 0
    assert made.rows[0].segments[0].width == 100  # of the drawing: the wait is not in it
    assert [row.slow for row in made.rows].count(True) == 1


def test_rows_are_paged_and_sorted_by_what_is_asked_for() -> None:
    job = MadeJob("wide", 100, 200)
    first = page(job, "checkpoints/199", sort="subtask")
    later = page(job, "checkpoints/199", sort="subtask", **{"from": "75"})
    assert re.findall(r'<td class="number">(\d+)</td>', first)[0] == "0"
    assert "76 to 100 of 100" in later
    assert "More rows" not in later


def test_a_checkpoint_whose_records_are_gone_says_so() -> None:
    text = page(MadeJob("clicks", 40, 500), "checkpoints/12")
    assert "Its records are cleaned" in text
    assert 'class="heat0"' not in text


def test_history_goes_back_page_by_page_to_the_first() -> None:
    job, before, seen = MadeJob("clicks", 2, 130), "", list[str]()
    while True:
        text = page(job, "checkpoints", **({"before": before} if before else {}))
        seen += re.findall(r'<td><a href="[^"]*/checkpoints/(\d+)">', text)
        older = re.search(r'rel="next" href="[^"]*before=(\d+)"', text)
        if older is None:
            break
        before = older[1]
    assert [int(one) for one in seen] == list(range(129, -1, -1))


def test_a_jump_shows_the_checkpoint_that_was_asked_for() -> None:
    text = page(MadeJob("clicks", 2, 10_000), "checkpoints", around="4321")
    assert "/checkpoints/4321" in text


@pytest.mark.parametrize(
    "path", ["/nothing", "/jobs/none/", "/jobs/clicks/none", "/jobs/clicks/checkpoints/999999"]
)
def test_what_is_not_there_is_said(path: str) -> None:
    found = site(MadeJob("clicks")).answer(path, {})
    assert found.status == 404
    assert b"There is no page" in found.body


@pytest.mark.parametrize("path", ["/static/../page.css", "/static/base.html", "/static/%2e%2e/x"])
def test_no_other_file_is_served(path: str) -> None:
    assert site(MadeJob("clicks")).answer(path, {}).status == 404


def test_an_error_of_the_store_is_a_page_that_says_what_to_do() -> None:
    @dataclass(frozen=True)
    class Down(MadeJob):
        def checkpoint(self, epoch: int) -> CheckpointFigures | None:
            raise StoreUnreachableError("The store s3://a is down.", todo="Bring it back.")

    text = page(Down("clicks"), "checkpoints/3", 503)
    assert "The store s3://a is down." in text
    assert "Bring it back." in text
    assert 'href="/jobs/clicks/"' in text  # the overview says since when


def test_a_mistake_in_the_page_shows_nothing_of_the_error() -> None:
    @dataclass(frozen=True)
    class Broken(MadeJob):
        def facts(self) -> RunFacts | StoredFacts:
            raise KeyError("a secret")

    assert "a secret" not in page(Broken("clicks"), "", 500)


@pytest.mark.parametrize("path", [*TABS, "checkpoints/9999"])
def test_a_thousand_subtasks_and_ten_thousand_checkpoints_load_under_a_second(path: str) -> None:
    shown, job = site(MadeJob("wide", 1_000, 10_000)), "/jobs/wide/"
    shown.answer(job + path, {})  # compiles the templates
    began_s = time.thread_time()  # whatever else the host does
    found = shown.answer(job + path, {})
    assert time.thread_time() - began_s < 1.0
    assert len(found.body) < 120_000
