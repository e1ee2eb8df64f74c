"""`statebackend savepoint`: what it prints, the shapes of its JSON, its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from recovery.savepoints.begin_with_savepoint import begin_job
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.state_at_epoch import saved_state
from snapshot.log.commit_log import CommitLog
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.cli.job_commands import app
from statebackend.errors import SettingError
from statebackend.runtime.driver.job import Job
from tests.cli.folder import JOB, OPERATOR, QUERY, Folder, new_id

if TYPE_CHECKING:
    from tests.support.s3 import S3


def run(*args: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["savepoint", *args])
    assert done.exit_code == status, done.output
    return done.stdout


def data(*args: str, status: int = 0) -> dict[str, Any]:
    document = json.loads(run(*args, "--json", status=status))
    assert document.pop("format") == 1
    return dict(document)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "state").as_uri()


@pytest.fixture
def folder(uri: str) -> Folder:
    made = Folder(open_store(job_folder(uri, JOB), new_id=new_id))
    return made.epochs(2, own=True).epochs(2, base="files")


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """Of a query with one source that is no file source; every batch is committed."""
    path = tmp_path / "checkpoint"
    for folder in ("offsets", "commits", "sources/0"):
        (path / folder).mkdir(parents=True)
    (path / "metadata").write_text(json.dumps({"id": QUERY}))
    (path / ".metadata.crc").write_bytes(b"crc")
    (path / "sources/0/0").write_text("v1\n17")
    for batch in range(4):
        (path / f"offsets/{batch}").write_text(f'v1\n{{}}\n{{"topic":{{"0":{batch}}}}}')
        (path / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return path


def created(uri: str, location: Path, *more: str) -> dict[str, Any]:
    args = ("--uri", uri, "--job", JOB, "--checkpoint-location", str(location), *more)
    return dict(data("create", *args)["savepoint"])


def test_create_list_describe_delete(uri: str, folder: Folder, location: Path) -> None:
    made = created(uri, location)
    assert (made["job"], made["epoch"], made["query_id"]) == (JOB, 3, QUERY)
    assert [one["uid"] for one in made["operators"]] == [OPERATOR]
    assert {one["name"] for one in made["spark"]} == {
        *("metadata", "offsets/2", "offsets/3", "commits/3", "sources/0/0")
    }
    (one,) = data("list", "--uri", uri)["savepoints"]
    assert (one["id"], one["uri"], one["complete"]) == (made["id"], made["uri"], True)
    assert data("list", "--uri", uri, "--job", "another")["savepoints"] == []
    assert data("describe", made["uri"])["savepoint"] == made
    assert made["id"] in run("list", "--uri", uri)
    assert OPERATOR in run("describe", made["uri"])
    assert "nothing was deleted" in run("delete", made["uri"])
    assert data("delete", made["uri"])["deleted"] is False
    assert data("delete", made["uri"], "--yes")["left"] == []
    assert data("list", "--uri", uri)["savepoints"] == []
    assert "no savepoint" in run("list", "--uri", uri)
    folder.check()


def test_to_another_place(uri: str, folder: Folder, location: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "before the change"
    made = created(uri, location, "--to", str(there))
    assert (there / "savepoint.json").is_file()
    assert data("list", "--uri", uri)["savepoints"] == []
    (one,) = data("list", "--in", str(tmp_path / "elsewhere"))["savepoints"]
    assert one["id"] == made["id"]
    assert data("describe", str(there))["savepoint"] == made
    args = ("--uri", uri, "--job", JOB, "--checkpoint-location", str(location))
    error = data("create", *args, "--to", str(there), status=2)["error"]
    assert "lies there already" in error["what"]


def test_a_savepoint_is_no_job_and_is_not_cleaned(uri: str, folder: Folder, location: Path) -> None:
    made = created(uri, location)
    beside = created(uri, location, "--to", f"{uri}/kept")
    listed = json.loads(CliRunner().invoke(app, ["list", uri, "--json"]).stdout)
    assert [one["job"] for one in listed["jobs"]] == [JOB]
    done = CliRunner().invoke(app, ["gc", uri, "--yes", "--min-age-s", "0"])
    assert done.exit_code == 0, done.output
    for one in (made, beside):
        found = data("describe", one["uri"], "--verify")
        assert found["ok"], found


def test_describe_verify_finds_damage(uri: str, folder: Folder, location: Path) -> None:
    made = created(uri, location)
    store = open_store(made["uri"], new_id=new_id)
    store.put(store.list("base/")[0].name, [b"other bytes"])
    found = data("describe", made["uri"], "--verify", status=1)
    assert not found["ok"]
    assert "SB3001" in run("describe", made["uri"], "--verify", status=1)


def test_describe_verify_of_a_record_cut_short_promises_nothing(
    uri: str, folder: Folder, location: Path
) -> None:
    made = created(uri, location)
    store = open_store(made["uri"], new_id=new_id)
    first = store.list("log/")[0].name
    store.put(first, [store.get(first)[:40]])
    said = run("describe", made["uri"], "--verify", status=1)
    assert "No query can begin with this savepoint" in said
    assert "once the records below are put back" in said or "can be restored" not in said


def test_errors_are_said_in_a_sentence(uri: str, folder: Folder, location: Path) -> None:
    error = data("describe", f"{uri}/nothing", status=2)["error"]
    assert error["code"] == "SB7001"
    error = data("delete", f"{uri}/nothing", "--yes", status=2)["error"]
    assert "nothing is deleted" in error["what"]
    (location / "state").mkdir()
    (location / "state/1").write_text("x")
    args = ("--uri", uri, "--job", JOB, "--checkpoint-location", str(location))
    assert data("create", *args, status=2)["error"]["code"] == "SB1013"
    assert CliRunner().invoke(app, ["savepoint", "list"]).exit_code == 2


def test_a_wrong_job_and_a_wrong_location_are_told_apart(
    uri: str, folder: Folder, location: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    args = ("--uri", uri, "--checkpoint-location")
    error = data("create", *args, str(location), "--job", "other", status=2)["error"]
    assert error["what"] == f"There is no job 'other' under {uri}: the jobs there are {JOB}."
    assert "--job" in error["todo"]
    error = data("create", *args, str(tmp_path / "empty"), "--job", JOB, status=2)["error"]
    assert "which location" in error["todo"]
    (location / "metadata").write_text(json.dumps({"id": "another"}))
    (location / "statebackend.json").write_text(json.dumps({"uri": uri, "job": "sessions"}))
    for batch in range(2, 4):
        (location / f"commits/{batch}").unlink()
    error = data("create", *args, str(location), "--job", JOB, status=2)["error"]
    assert "is not the checkpoint location of job" in error["what"]
    assert "of another query (of job 'sessions') and stands at batch 1. The job" in error["what"]
    assert "stands at batch 3." in error["what"]


def test_from_a_folder_to_s3_and_back(
    uri: str, folder: Folder, location: Path, ministack: S3
) -> None:
    """Savepoints lie in another store than the job, and in a hidden folder of S3."""
    flags = ("--s3-endpoint", ministack.plain_url, "--s3-region", "us-east-1")
    bucket = ministack.fresh_uri()
    made = created(uri, location, "--to", f"{bucket}/.savepoints/clicks/first", *flags)
    (one,) = data("list", "--uri", bucket, *flags)["savepoints"]
    assert (one["uri"], one["epoch"]) == (made["uri"], 3)
    assert data("describe", made["uri"], "--verify", *flags)["ok"]
    done = CliRunner().invoke(app, ["list", bucket, "--json", *flags])
    assert json.loads(done.stdout)["jobs"] == []
    store = open_store(made["uri"], new_id=new_id, options=ministack.options())
    savepoint = read_savepoint(store)
    back = open_store(job_folder(uri, "clone"), new_id=new_id)
    begin_job(
        saved_state(store, savepoint, log_of(store, savepoint.job)),
        savepoint,
        store,
        back,
        log_of(back, "clone"),
        after=-1,
        query_id="another",
        new_id=new_id,
    )
    done = CliRunner().invoke(app, ["verify", uri, "--job", "clone", "--json"])
    assert json.loads(done.stdout)["ok"], done.stdout
    assert data("delete", made["uri"], "--yes", *flags)["left"] == []
    assert data("list", "--uri", bucket, *flags)["savepoints"] == []


def log_of(store: Any, job: str) -> CommitLog:
    return CommitLog(store, job=job, writer="test", new_id=new_id)


# --- a savepoint is no job -----------------------------------------------------------------------


@pytest.fixture
def saved(uri: str, folder: Folder, location: Path) -> Path:
    """A savepoint in the place of a job called "saved"."""
    created(uri, location, "--to", job_folder(uri, "saved"))
    return Path(job_folder(uri, "saved").removeprefix("file://"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("left", ["whole", "never finished", "half deleted"])
def test_nothing_is_cleaned_of_a_savepoint(uri: str, saved: Path, left: str) -> None:
    if left != "whole":
        name = "savepoint.json" if left == "never finished" else "savepoint.begun"
        (saved / name).unlink()
    before = files(saved)
    runner = CliRunner()
    for args in ((uri, "--job", "saved"), (saved.as_uri(),), (saved.as_uri(), "--job", "any")):
        done = runner.invoke(app, ["gc", *args, "--yes", "--min-age-s", "0"])
        if "any" not in args:
            assert done.exit_code == 2
            assert "SB1001" in done.stderr
            assert "is the folder of a savepoint" in done.stderr
    assert files(saved) == before


@pytest.mark.parametrize("left", ["whole", "never finished", "half deleted"])
def test_a_query_in_a_savepoints_folder_is_refused_before_anything_is_written(
    uri: str, saved: Path, left: str
) -> None:
    if left != "whole":
        name = "savepoint.json" if left == "never finished" else "savepoint.begun"
        (saved / name).unlink()
    before = files(saved)
    job = Job(uri, "saved")
    for ask in (lambda: job.store, job.log, job.manifests, job.lineages):
        with pytest.raises(SettingError, match=r"saved is the folder of a savepoint"):
            ask()
    assert files(saved) == before
    assert Job(uri, "another").manifests() == []
