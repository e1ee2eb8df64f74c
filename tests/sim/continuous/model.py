"""The truth about a continuous job: its input, and what must come of it, as arithmetic."""

from __future__ import annotations

from zlib import crc32

__all__ = ["BUCKETS", "RULE", "SPLIT_ROWS", "Model"]

SPLIT_ROWS = 1_000_000  # more than a split ever gives
RULE = 1
BUCKETS = 3
_LENGTH = 120  # of a text


class Model:
    """Every row's key, number among those of its key, and every rule's content, by the seed."""

    def __init__(self, seed: int, *, keys: int, contents: int) -> None:
        self._seed, self._keys, self._contents = seed, keys, contents
        self._ranks: dict[int, list[int]] = {}  # by split: of each row, from 1
        self._ids: dict[int, list[int]] = {}  # by key: its rows

    def key(self, id: int) -> int:
        """The key of a row; the rows of a key are all of one split."""
        split = id // SPLIT_ROWS
        return split * self._keys + self.drawn("key", id) % self._keys

    def rank(self, id: int) -> int:
        """Which of its key's rows it is, from 1."""
        split, place = divmod(id, SPLIT_ROWS)
        ranks = self._ranks.setdefault(split, [])
        while len(ranks) <= place:
            row = split * SPLIT_ROWS + len(ranks)
            ids = self._ids.setdefault(self.key(row), [])
            ids.append(row)
            ranks.append(len(ids))
        return ranks[place]

    def ids(self, key: int, ranks: int) -> list[int]:
        """The first rows of a key, which are known to be there."""
        return self._ids.get(key, [])[:ranks]

    def bucket(self, id: int) -> int:
        """By what the second operator has a row for its key; also of what a timer gave."""
        return self.drawn("bucket", id) % BUCKETS

    def content(self, rules: int) -> str:
        """The text that is in force after so many rules; "": none."""
        if not rules:
            return ""
        number = self.drawn("rule", rules) % (self._contents + 1)
        return f"{number}" * _LENGTH if number else ""

    def drawn(self, what: str, number: int) -> int:
        """A number of its own for each question."""
        return crc32(f"{what} {self._seed} {number}".encode())
