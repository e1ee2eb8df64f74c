"""What the page shows of settings, and who gets a page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bench.page_jobs import MadeJob, MadeJobs
from snapshot.log.commit_log import CommitLog
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import SettingError
from statebackend.runtime.driver.job import Job
from statebackend.settings import Settings
from statebackend.system import SYSTEM, System
from statebackend.ui import driver_page as pages
from statebackend.ui.checkpoint_detail import section
from statebackend.ui.driver_page import driver_page
from statebackend.ui.job_figures import RunFacts
from statebackend.ui.job_pages import JobSite
from statebackend.ui.newer_driver import NewerDriver
from statebackend.ui.running_job_view import RunningJobView, setting_lines
from tests.cli.folder import new_id
from tests.monitoring.watched import restored, watched_job
from tests.recovery import driver
from tests.recovery.driver import Started, ack_of, begin_of, part_of
from tests.support.failing_store import FailingStore, Failure

TOKEN = "a secret of 16 or more"


def settings(**given: Any) -> Settings:
    return Settings.resolve(given, {"spark.statebackend.openStores": "5"}.get)


def test_a_secret_setting_is_not_shown_anywhere() -> None:
    found = settings(ui_token=TOKEN)
    lines = setting_lines(found)
    assert TOKEN not in repr(lines)
    assert TOKEN not in repr(found)
    assert next(line.value for line in lines if line.name == "ui_token") == "(not shown)"
    assert next(line.value for line in setting_lines(settings()) if line.name == "ui_token") == ""


def test_a_wrong_secret_is_not_in_the_error() -> None:
    with pytest.raises(SettingError) as caught:
        settings(ui_token="too short")
    assert "too short" not in str(caught.value)


def test_each_setting_says_where_it_came_from() -> None:
    origins = {line.name: line.origin for line in setting_lines(settings(tls=0))}
    assert origins["tls"] == "argument"
    assert origins["open_stores"] == "session key"
    assert origins["uri"] == "default"
    assert list(origins)[:2] == ["tls", "open_stores"]  # those that were given come first


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_pages", {})


@pytest.mark.usefixtures("no_pages")
def test_jobs_of_one_driver_share_a_page_and_its_token() -> None:
    made: list[tuple[str, int, str]] = []

    class Page:
        def __init__(self, host: str, port: int, token: str) -> None:
            made.append((host, port, token))
            self.token = token

    def asked(token: str) -> Any:
        return driver_page(settings(ui_port=8080, ui_token=token), Page)  # type: ignore[arg-type]

    assert asked(TOKEN) is asked(TOKEN)
    assert made == [("127.0.0.1", 8080, TOKEN)]
    with pytest.raises(SettingError, match="another token"):
        asked("another of 16 or more")


def test_a_job_starts_until_its_log_is_claimed(tmp_path: Path) -> None:
    def facts(**given: Any) -> tuple[bool, bool]:
        view = RunningJobView(replace(watched_job(tmp_path), **given))
        found = view.facts()
        view.close()
        assert isinstance(found, RunFacts)
        return found.starting, found.active

    begun = Started(MemoryStore(), {"op": 1}).session
    assert facts() == (True, True)
    assert facts(session=lambda: begun) == (False, True)
    assert facts(session=lambda: begun, is_active=lambda: False) == (False, False)
    assert facts(is_active=lambda: False) == (False, False)  # a continuous job that has ended


def test_a_driver_without_input_shows_that_another_has_claimed_the_job(tmp_path: Path) -> None:
    now_s = [100.0]
    system = SimpleNamespace(
        **{name: getattr(SYSTEM, name) for name in dir(SYSTEM) if name[0] != "_"}
    )
    system.monotonic_s = lambda: now_s[0]
    job = Job(tmp_path.as_uri(), driver.JOB, system=cast(System, system))
    session = Started(job.store, {"op": 1}).session
    view = RunningJobView(replace(watched_job(tmp_path), job=job, session=lambda: session))

    def failure() -> str:
        found = view.facts()
        assert isinstance(found, RunFacts)
        return found.failure

    now_s[0] += 20
    assert failure() == ""
    log = CommitLog(job.store, job=driver.JOB, writer="host:2", new_id=new_id)
    log.claim(query_id="query", run="second")
    assert failure() == "", "the store is not asked on every look"
    now_s[0] += 20
    assert failure() == "another driver (host:2) has claimed the job."
    view.close()


def test_a_store_that_does_not_answer_is_asked_seldom_who_has_claimed_the_job() -> None:
    asked: list[float] = []
    now_s = 0.0

    def lost(verb: str, name: str, number: int) -> Failure:
        asked.append(now_s)
        return "before"

    newer = NewerDriver(FailingStore(MemoryStore(), lost), "job", 0.0)
    for now_s in (5.0, 15.0, 30.0, 70.0, 80.0):
        assert newer.than(1, None, now_s) == ""
    assert asked == [15.0, 80.0]


def test_a_job_that_starts_again_knows_what_is_durable() -> None:
    made = MadeJob("j", 3, 42, running=RunFacts(active=False, starting=True))
    page = JobSite(MadeJobs([made]), lambda: 0).answer("/jobs/j/", {}).body.decode()
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "Starting: " in text
    assert "The next start goes on after checkpoint 41." in text
    assert "data-refresh" in page


def test_a_checkpoint_under_way_says_who_has_begun_and_where_states_came_from(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    started = Started(store, {"op": 3, "after": 2})
    session = started.session
    reply = session.begin(begin_of(0, 0))[0]
    session.begin(begin_of(0, 1))
    ack = ack_of(reply.chain, part_of({b"k": b"v"}), 0, 0)
    session.ack(msgspec.structs.replace(ack, restore=restored("local")))
    job = replace(watched_job(tmp_path), session=lambda: session, progress=session.progress)
    view = RunningJobView(job)
    facts, checkpoint = view.facts(), view.checkpoint(0)
    restores = view.history(None, 5).restores
    assert view.history(0, 5).restores == []
    view.close()
    assert isinstance(facts, RunFacts)
    waiting = {one.operator: (one.subtasks, one.not_begun) for one in facts.waiting}
    assert waiting == {"op": ([1, 2], [2]), "after": ([0, 1], [0, 1])}
    assert facts.moved_s is not None
    assert [(one.operator, one.by_source) for one in restores] == [("op", {"local": 1})]
    assert checkpoint is not None
    first = section(checkpoint.operators[0], "took", 0, tells_begins=True)
    assert [(row.subtask, row.cells[1][0]) for row in first.rows][:2] == [
        (1, "not yet"),
        (2, "not begun"),
    ]
