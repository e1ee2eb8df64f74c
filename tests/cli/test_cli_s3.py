"""The command line over S3: a real server on loopback, reached by flags or by the environment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.cli.job_commands import app
from tests.cli.folder import JOB, OPERATOR, Folder, new_id

if TYPE_CHECKING:
    from tests.support.s3 import S3


def data(*args: str, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == status, done.output
    return dict(json.loads(done.stdout))


def test_a_job_on_s3_is_listed_checked_and_cleaned(
    ministack: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = ministack.fresh_uri()
    store = open_store(job_folder(uri, JOB), new_id=new_id, options=ministack.options())
    folder = Folder(store).epochs(2, own=True).claim("host:2").epochs(2, base="files", own=True)
    flags = ("--s3-endpoint", ministack.plain_url, "--s3-region", "us-east-1")

    (listed,) = data("list", uri, *flags)["jobs"]
    assert (listed["job"], listed["epoch"]) == (JOB, 3)
    assert listed["modified_ms"] > 1_600_000_000_000
    assert data("verify", uri, *flags)["ok"] is True

    (young,) = data("gc", uri, "--yes", *flags)["jobs"]
    assert young["removed"] == {}
    before = {one.name for one in store.list("")}
    (cleaned,) = data("gc", uri, "--yes", "--min-age-s", "0", *flags)["jobs"]
    gone = sum(tally["objects"] for tally in cleaned["removed"].values())
    left = {one.name for one in store.list("")}
    assert gone == len(before - left) > 0
    assert all(name.startswith("history/") for name in left - before)  # the summary of what is gone
    assert cleaned["requests"]["list"] == 5  # one of them of the history
    folder.check()

    monkeypatch.setenv("STATEBACKEND_S3_ENDPOINT", ministack.plain_url)
    monkeypatch.setenv("STATEBACKEND_S3_REGION", "us-east-1")
    (job,) = data("verify", uri)["jobs"]
    assert job["restorable"] == {OPERATOR: [2, 3]}
    checks = {check["name"]: check for check in data("doctor", "--uri", uri)["checks"]}
    assert checks["store"]["status"] == checks["clock"]["status"] == "ok"
    assert "the store" in checks["clock"]["detail"]


def test_a_server_that_is_not_there_is_a_sentence_and_status_2(
    aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statebackend.cli.job_folders.DEADLINE_S", 0.5)
    flags = ("--s3-endpoint", "http://127.0.0.1:9", "--s3-region", "us-east-1")
    answer = data("list", "s3://nobody/jobs", *flags, status=2)
    assert answer["error"]["code"] == "SB2002"
