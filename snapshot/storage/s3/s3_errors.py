"""What botocore raises, and what to tell the user about it.

No text here holds a secret: of answers about credentials only the code is repeated.
"""

from __future__ import annotations

from typing import Any

import urllib3.exceptions
from botocore import exceptions as boto

from snapshot.storage.call_texts import call_text
from statebackend.errors import (
    LocalCopyError,
    ObjectNotFoundError,
    StateBackendError,
    StorageError,
    StoreCapabilityError,
    StoreUnreachableError,
)

__all__ = [
    "CALL_ERRORS",
    "CODED",
    "EXPIRED",
    "GIVE_ENDPOINT",
    "PASSING",
    "DeadlinePassedError",
    "error_code",
    "http_status",
    "no_tls",
    "own_error",
    "said",
    "typed_error",
]


class DeadlinePassedError(Exception):
    """The deadline passed between two of botocore's own tries.

    Attributes:
        last: the failure of the try before.
    """

    def __init__(self, last: BaseException) -> None:
        super().__init__()
        self.last = last


# The last two are what reading a body may raise after the headers were fine.
CALL_ERRORS: tuple[type[Exception], ...] = (
    DeadlinePassedError,
    boto.ClientError,
    boto.BotoCoreError,
    urllib3.exceptions.HTTPError,
    OSError,
)

# Statuses that mean several things: which one, only the code in the body tells.
CODED = (400, 403, 404, 409)

_MISSING = ("NoSuchKey", "NotFound")
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
PASSING = (
    "ConditionalRequestConflict",  # 409: another conditional write of this name is under way
    "OperationAborted",  # 409, likewise
    "BadDigest",  # the body was damaged on its way
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
    "InternalError",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
)
_NO_BUCKET = "NoSuchBucket"
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "record layer failure")
_SHOWN = 300  # characters
_CHAIN = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.RefreshWithMFAUnsupportedError,
    boto.InfiniteLoopConfigError,
)
_KEYS = "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile or the role in use."
_GIVEN_AS = "s3_endpoint=, on the command line --s3-endpoint"
_ENDPOINT = f"the endpoint ({_GIVEN_AS}; if none is given, it is Amazon's)"
GIVE_ENDPOINT = f"if the store is not Amazon's, give its endpoint ({_GIVEN_AS})"
_REGION = "Set the region that the bucket is in (s3_region=, on the command line --s3-region)."
_TODO = {
    _NO_BUCKET: f"Create the bucket, or correct its name or {_ENDPOINT}.",
    "InvalidBucketName": "Correct the bucket's name.",
    "AccessDenied": "Allow s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload on "
    "the objects and s3:ListBucket on the bucket (without which an absent object is refused, too).",
    "AllAccessDisabled": "Ask the owner of the account.",
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": f"{_KEYS} A proxy that changes requests does this as well.",
    "InvalidToken": f"{_KEYS} A session token of other keys does this.",
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "PermanentRedirect": _REGION,
    "RequestTimeTooSkewed": "Set this host's clock: it is minutes off (NTP).",
    "KMS.DisabledException": "Enable the KMS key.",
    "KMS.NotFoundException": "Correct the KMS key's id.",
    "QuotaExceeded": "Free space in the bucket or raise its quota.",
}
_SILENT = frozenset(  # their messages may repeat parts of the credentials or of the signature
    (
        *EXPIRED,
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"),
        *(
            "AuthorizationHeaderMalformed",
            "IncompleteSignature",
            "AuthorizationQueryParametersError",
        ),
    )
)


def error_code(error: BaseException) -> str:
    """The store's code for a refusal; empty if the store did not answer."""
    return str(_detail(error).get("Code", ""))


def http_status(error: BaseException) -> int:
    """The HTTP status of a refusal; 0 if the store did not answer."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _detail(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, boto.ClientError):
        return {}
    found: dict[str, Any] = error.response.get("Error", {})
    return found


def said(answer: dict[str, Any], field: str) -> Any:
    """What a whole answer always says; without it, it is no answer, and is asked for again."""
    if field not in answer:
        raise boto.IncompleteReadError(actual_bytes=0, expected_bytes=1)
    return answer[field]


def no_tls(error: BaseException) -> bool:
    """Whether something else than TLS was answered: by a server of plain HTTP, say."""
    return isinstance(error, boto.SSLError) and any(one in str(error) for one in _NO_TLS)


def own_error(error: BaseException) -> StateBackendError | None:
    """Our own error, raised while botocore read a body that is sent."""
    inner = getattr(error, "kwargs", {}).get("error")
    return inner if isinstance(inner, StateBackendError) else None


def typed_error(
    error: BaseException, verb: str, name: str, uri: str, tries: str = ""
) -> StateBackendError:
    """The error to raise instead.

    Args:
        error: what botocore or a body raised.
        verb: what was tried: `write`, `create`, `read`, `list`, `delete`.
        name: of the object, or a prefix.
        uri: of the store.
        tries: how long it was tried, for the text.
    """
    inner = own_error(error)
    if isinstance(inner, LocalCopyError):
        return inner
    if error_code(error) in _MISSING and verb == "read":
        return ObjectNotFoundError(f"There is no object {name!r} in {uri}.")
    return _failed(error, f"Could not {call_text(verb, name, uri)}", tries)


def _failed(error: BaseException, what: str, tries: str) -> StorageError:
    code = error_code(error)
    if code:
        message = "" if code in _SILENT else str(_detail(error).get("Message", ""))[:200]
        reason = f"{code} (HTTP {http_status(error)}{', ' if message else ''}{message})"
        if code == _NO_BUCKET:
            reason = f"the bucket does not exist ({code}, HTTP {http_status(error)})"
        kind = StoreCapabilityError if http_status(error) == 501 else StoreUnreachableError
        return kind(f"{what}: {reason}{tries}.", todo=_todo(code))
    if isinstance(error, _CHAIN):
        return StoreUnreachableError(
            f"{what}: no usable credentials were found ({type(error).__name__}: {_text(error)}).",
            todo="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or run with a role: "
            "on every executor, not only on the driver.",
        )
    if no_tls(error):
        return StoreUnreachableError(
            f"{what}: the server does not speak TLS at this port ({_text(error)}){tries}.",
            todo=f"If it speaks plain HTTP, write http:// in the endpoint ({_GIVEN_AS}). "
            "Otherwise correct the port.",
        )
    if isinstance(error, boto.SSLError):
        return StoreUnreachableError(
            f"{what}: the TLS connection failed ({_text(error)}){tries}.",
            todo="Check the server's certificate, and that s3_ca_bundle= (or AWS_CA_BUNDLE) is the "
            "file of its authority.",
        )
    return StoreUnreachableError(
        f"{what}: no whole answer came ({type(error).__name__}: {_text(error)}){tries}.",
        todo=f"Check {_ENDPOINT}, the network and the proxy (NO_PROXY).",
    )


def _text(error: BaseException) -> str:
    """What an error of botocore's says: it stands for the whole chain of errors below it."""
    return " ".join(str(error).split())[:_SHOWN].rstrip(".")


def _todo(code: str) -> str:
    if code in EXPIRED:
        return "Provide fresh credentials where this process finds its own, or a role to assume."
    if code in PASSING:
        return "The store is overloaded or ill: wait, then start again."
    return _TODO.get(code, "Look the code up in the store's documentation.")
