"""Where a job lies: one folder, whatever its name, in every kind of store and form of URI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from recovery.inspect.job_list import split_jobs
from snapshot.storage.object_store import ObjectInfo, is_name
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import folder_name, job_folder
from statebackend.cli.job_commands import app
from statebackend.cli.job_folders import place_of
from statebackend.errors import SettingError
from statebackend.runtime.driver.job import Job
from tests.cli.folder import Folder, new_id

if TYPE_CHECKING:
    from tests.support.s3 import S3

PLAIN = ["clicks", "clicks-v1.2_b~c", "2026"]
ODD = [
    "a/b",
    "a%2Fb",
    "a%252Fb",
    "a b",
    "50%",
    "größe",
    "日本",
    ".hidden",
    "..a",
    "a.",
    "a\\b",
    "a?b#c",
]
ODD += ["/", "a//b", "log", "a\nb"]
FORMS = ["", "file://", "file:"]


@pytest.mark.parametrize("form", FORMS)
def test_a_job_is_one_folder_and_the_same_one_in_every_form_of_uri(
    form: str, tmp_path: Path
) -> None:
    for job in PLAIN + ODD:
        place = open_store(job_folder(f"{form}{tmp_path}/", job), new_id=new_id)
        assert place.uri == (tmp_path / folder_name(job)).as_uri()
        Folder(place, job=job).epochs(1)
        assert Job(f"{form}{tmp_path}", job).local_name == Job(str(tmp_path), job).local_name
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(folder_name, PLAIN + ODD))
    assert all((tmp_path / job / "log").is_dir() for job in PLAIN)  # under their own names

    done = CliRunner().invoke(app, ["list", f"{form}{tmp_path}", "--json"])
    assert done.exit_code == 0, done.output
    assert sorted(job["job"] for job in json.loads(done.stdout)["jobs"]) == sorted(PLAIN + ODD)
    done = CliRunner().invoke(app, ["verify", f"{form}{tmp_path}", "--json"])
    assert done.exit_code == 0, done.output


def test_a_folder_with_escapes_in_its_own_name_holds_jobs_like_any_other(tmp_path: Path) -> None:
    root = tmp_path / "a%20b c"
    Folder(open_store(job_folder(root.as_uri(), "x/y"), new_id=new_id), job="x/y").epochs(1)
    assert (root / "x%2Fy" / "log").is_dir()
    assert list(split_jobs(str(root), open_store(str(root), new_id=new_id).list(""))) == ["x/y"]


@pytest.mark.full  # test_cli_s3 has a job on S3
def test_jobs_of_every_name_lie_side_by_side_on_s3(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    options = ministack.options()
    for job in PLAIN + ODD:
        store = open_store(job_folder(uri, job), new_id=new_id, options=options)
        assert store.uri == f"{uri}/{folder_name(job)}"
        Folder(store, job=job).epochs(1)
    flags = ("--s3-endpoint", ministack.plain_url, "--s3-region", "us-east-1", "--json")
    done = CliRunner().invoke(app, ["list", uri, *flags])
    assert done.exit_code == 0, done.output
    assert sorted(job["job"] for job in json.loads(done.stdout)["jobs"]) == sorted(PLAIN + ODD)
    assert CliRunner().invoke(app, ["verify", uri, *flags]).exit_code == 0


def test_the_backend_and_the_command_line_mean_the_same_folder() -> None:
    for uri in ("file:///x", "/x/", "s3://bucket/x", "s3://bucket"):
        for job in PLAIN + ODD:
            assert Job(uri, job, options=StoreOptions()).store_uri == job_folder(uri, job)


@given(st.text(min_size=1, max_size=20).filter(lambda job: job.strip(".")))
def test_a_folder_is_a_part_of_a_name_and_no_two_jobs_share_it(job: str) -> None:
    try:
        name = folder_name(job)
    except SettingError:
        assert re.search("[\ud800-\udfff]", job) or len(job.encode()) > 80
        return
    assert is_name(name)
    assert "/" not in name
    record = ObjectInfo(f"{name}/log/{0:020}.ckpt", 1)
    assert list(split_jobs("s3://bucket", [record])) == [job]


@pytest.mark.parametrize("job", ["", ".", "..", "\ud800", "x" * 256, "ö" * 50])
def test_a_name_that_can_have_no_folder_is_refused(job: str) -> None:
    with pytest.raises(SettingError, match="name"):
        Job("file:///x", job)


def test_folders_that_are_no_jobs_own_are_not_listed_as_one() -> None:
    """Listed under a name that opens another folder, a job would look empty."""
    names = ["a b", "a%2fb", "a%zz", ".x", "team/clicks", "clicks"]
    listing = [ObjectInfo(f"{name}/log/{0:020}.ckpt", 1) for name in names]
    assert list(split_jobs("s3://bucket", listing)) == ["clicks"]


def test_a_job_that_is_alone_need_not_be_named(tmp_path: Path) -> None:
    place = place_of(str(tmp_path), "", "")
    with pytest.raises(SettingError, match="There is no job under"):
        place.one(None)
    for job in ("clicks", "sales"):
        Folder(open_store(job_folder(str(tmp_path), job), new_id=new_id), job=job).epochs(1)
        if job == "clicks":
            assert place.one(None) == "clicks"
    with pytest.raises(SettingError, match=r"There are 2 jobs under .*: clicks, sales") as error:
        place.one(None)
    assert "--job" in error.value.todo
    assert place.one("sales") == "sales"
