"""The page over real folders: `statebackend ui`, read without a claim."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.page_history import write_history
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.texts import when
from statebackend.ui.job_pages import JobSite
from statebackend.ui.page_server import PageServer
from statebackend.ui.stored_job_view import StoredJobs
from tests.cli.folder import JOB, OPERATOR, Folder, new_id

NOW_MS = 1_700_000_100_000


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "state").as_uri()


@pytest.fixture
def folder(uri: str) -> Folder:
    made = Folder(open_store(job_folder(uri, JOB), new_id=new_id), job=JOB).epochs(5)
    return made.claim("host:2").epochs(2, base="base")


@pytest.fixture
def site(uri: str, folder: Folder) -> JobSite:
    return JobSite(StoredJobs(uri, StoreOptions()), lambda: NOW_MS)


def page(site: JobSite, path: str, status: int = 200) -> str:
    found = site.answer(path, {})
    assert found.status == status, found.body.decode()
    return found.body.decode()


def objects(folder: Folder) -> dict[str, int | None]:
    return {info.name: info.modified_ms for info in folder.store.list("")}


def test_the_list_leads_to_every_job(site: JobSite, uri: str) -> None:
    Folder(open_store(job_folder(uri, "a/b"), new_id=new_id), job="a/b")
    text = page(site, "/")
    assert 'href="/jobs/clicks%20per%20user/"' in text
    assert 'href="/jobs/a%2Fb/"' in text
    assert "No checkpoint is durable yet" in page(site, "/jobs/a%2Fb/")


def test_every_page_of_a_job_reads_and_nothing_is_written(site: JobSite, folder: Folder) -> None:
    before, root = objects(folder), "/jobs/clicks%20per%20user/"
    overview = page(site, root)
    assert "Checkpoint 6 is the newest" in overview
    written_ms = before[max(name for name in before if name.startswith("log/"))]
    assert f"written {when(written_ms)} by host:2" in overview  # by the store's clock
    assert f"{root}checkpoints/6" in page(site, f"{root}checkpoints")
    one = page(site, f"{root}checkpoints/6")
    assert OPERATOR in one
    assert "1 to 2 of 2" in one
    assert re.search(r"host:2</td><td[^>]*>20\d\d-", page(site, f"{root}restores"))
    assert "There are none" in page(site, f"{root}savepoints")
    assert "reads the store alone" in page(site, f"{root}settings")
    page(site, f"{root}summary")
    assert objects(folder) == before


def test_a_page_that_is_read_again_shows_what_came_since(site: JobSite, folder: Folder) -> None:
    root = "/jobs/clicks%20per%20user/"
    assert "checkpoints/7" not in page(site, root)
    folder.epoch()
    assert "checkpoints/7" in page(site, root)


def test_states_and_key_groups_are_shown_and_read_once_for_each_record(uri: str) -> None:
    store = open_store(job_folder(uri, "wide"), new_id=new_id)
    write_history(store, "wide", subtasks=3, epochs=70)
    jobs = StoredJobs(uri, StoreOptions())
    text = " ".join(
        re.sub(r"<[^>]*>", " ", page(JobSite(jobs, lambda: NOW_MS), "/jobs/wide/state")).split()
    )
    assert "count value" in text
    assert "user string" in text
    assert "n bigint" in text
    view = jobs.view("wide")
    assert view is not None
    (operator,) = view.operators()
    assert (operator.parallelism, len(operator.key_groups)) == (3, 3)
    assert all(operator.subtask_bytes)  # also before there is a full copy
    assert view.states() is view.states()


@pytest.fixture
def served(site: JobSite) -> Iterator[PageServer]:
    server = PageServer(site, host="127.0.0.1", port=0, token="")
    yield server
    server.stop()


def test_several_browsers_at_once_see_the_same(served: PageServer) -> None:
    seen: list[str] = []

    def look() -> None:
        url = f"{served.url}jobs/clicks%20per%20user/checkpoints"
        with urllib.request.urlopen(url, timeout=20) as answer:
            seen.append(answer.read().decode())

    threads = [threading.Thread(target=look) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
