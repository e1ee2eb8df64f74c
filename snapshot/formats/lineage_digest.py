"""The lineage digest of a subtask: its deltas' digests in a chain, from its start on."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from statebackend.errors import SettingError

__all__ = ["DIGEST_BYTES", "chain", "chain_rescaled", "chain_start"]

DIGEST_BYTES = 32

_CHAIN_START_CONTEXT = "statebackend 2026 lineage chain start v1"
_CHAIN_STEP = blake3(derive_key_context="statebackend 2026 lineage chain step v1")
_CHAIN_RESCALED_CONTEXT = "statebackend 2026 lineage chain rescaled v1"


def chain_start(job_id: str, operator: str, key_groups: tuple[int, int]) -> bytes:
    """The lineage digest (32 bytes) of a subtask that has no epoch yet.

    Args:
        job_id: the job's identity, not its name.
        operator: the operator's uid.
        key_groups: first and last key group, inclusive.
    """
    hasher = blake3(derive_key_context=_CHAIN_START_CONTEXT)
    for text in (job_id, operator):
        field = text.encode()
        hasher.update(len(field).to_bytes(4, "little"))  # so that no two field lists look alike
        hasher.update(field)
    for group in key_groups:
        hasher.update(group.to_bytes(4, "little"))
    return hasher.digest()


def chain_rescaled(
    key_groups: tuple[int, int], parents: Iterable[tuple[tuple[int, int], bytes]]
) -> bytes:
    """The lineage digest (32 bytes) of a subtask that begins with parts of others' states.

    The same parts give the same digest, whenever and however often the parallelism changes.

    Args:
        key_groups: first and last key group, inclusive.
        parents: of each subtask that the parts come from, its key groups and its lineage digest.
    """
    hasher = blake3(derive_key_context=_CHAIN_RESCALED_CONTEXT)
    for groups, digest in [(key_groups, b""), *sorted(parents)]:
        for group in groups:
            hasher.update(group.to_bytes(4, "little"))
        hasher.update(digest)
    return hasher.digest()


def chain(previous: bytes, digest: bytes) -> bytes:
    """The lineage digest (32 bytes) after one more delta: `H(previous, digest)`.

    Raises:
        SettingError: either is not 32 bytes.
    """
    if len(previous) != DIGEST_BYTES or len(digest) != DIGEST_BYTES:
        raise SettingError(
            f"A lineage needs digests of {DIGEST_BYTES} bytes, not {len(previous)}/{len(digest)}."
        )
    hasher = _CHAIN_STEP.copy()  # a start follows tens of thousands of deltas
    return hasher.update(previous + digest).digest()
