"""The lineages of a log's operators, without those that the last run no longer had. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import OperatorLineage, resolve

__all__ = ["ResolvedOnce", "live_lineages", "named_operators", "without_dropped"]


def named_operators(manifests: Iterable[Manifest]) -> dict[str, int] | None:
    """The operators of the run that wrote last, with their first epochs; None: not said."""
    named = [m.settings["operators"] for m in manifests if "operators" in m.settings]
    return named[-1] if named else None


def live_lineages(manifests: Sequence[Manifest]) -> dict[str, OperatorLineage]:
    """The lineages of a log, without operators that the last run no longer had.

    Raises:
        CorruptionError: the lineage digests do not follow from one another.
    """
    return without_dropped(resolve(manifests), manifests)


class ResolvedOnce:
    """The lineages of a log that is asked for them again and again, as each start does.

    They are resolved once for as long as the log is the same.
    """

    def __init__(self) -> None:
        self._known: tuple[list[Manifest], dict[str, OperatorLineage]] = [], {}

    def of(self, manifests: Sequence[Manifest]) -> Mapping[str, OperatorLineage]:
        """As `live_lineages`: to be looked at, not to be changed."""
        known = self._known
        if known[0] != manifests:
            known = self._known = list(manifests), live_lineages(manifests)
        return known[1]

    def take(self, manifests: Sequence[Manifest]) -> dict[str, OperatorLineage]:
        """As `live_lineages`: the caller's own, and kept here no longer."""
        taken = dict(self.of(manifests))
        self._known = [], {}
        return taken


def without_dropped(
    lineages: Mapping[str, OperatorLineage], manifests: Iterable[Manifest]
) -> dict[str, OperatorLineage]:
    """Those of operators that the last run still had."""
    named = named_operators(manifests)
    return {
        uid: lineage
        for uid, lineage in lineages.items()
        if named is None or named.get(uid) == lineage.first_epoch
    }
