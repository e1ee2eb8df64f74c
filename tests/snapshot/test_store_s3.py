"""S3 against real servers over HTTP and HTTPS: the public suite, and what is particular to S3."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from snapshot.storage import ObjectStore, open_store
from snapshot.storage.testing import StoreTests
from tests.snapshot import test_commit_log, test_commit_log_answers
from tests.snapshot.fresh_ids import new_id

if TYPE_CHECKING:
    from tests.support.s3 import S3


class S3Suite(StoreTests):
    kind = ""
    tls = False

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> ObjectStore:
        s3: S3 = request.getfixturevalue(self.kind)
        return open_store(s3.fresh_uri(), new_id=new_id, options=s3.options(tls=self.tls))


class TestMinistack(S3Suite):
    kind = "ministack"


@pytest.mark.full  # a server of its own
class TestMinistackOverTls(S3Suite):
    kind = "ministack"
    tls = True


@pytest.mark.full  # a second server, beside ministack
class TestMoto(S3Suite):
    kind = "moto"


@pytest.mark.full  # a second server, beside ministack
class TestMotoOverTls(S3Suite):
    kind = "moto"
    tls = True


# --- the commit log on S3 ------------------------------------------------------------------------


@pytest.fixture
def store(ministack: S3) -> ObjectStore:
    return open_store(ministack.fresh_uri(), new_id=new_id, options=ministack.options(tls=True))


# Every test of the log that runs on any store runs on the fixture above, too.
globals().update(
    {
        name: test
        for log_tests in (test_commit_log, test_commit_log_answers)
        for name, test in vars(log_tests).items()
        if name.startswith("test_") and "store" in inspect.signature(test).parameters
    }
)
