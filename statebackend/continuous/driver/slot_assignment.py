"""Which subtasks run in which slot: where copies of their state are. Pure.

A slot is a process that Spark has started somewhere; that it is the third of them says nothing. So
each tells what copies it sees on its host, and subtask *i* of every vertex goes to one slot. Slots
of one host see the same copies, and each subtask runs once: the others get something else of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from statebackend.continuous.job.slot_messages import Copy
from statebackend.keygroups import KeyGroupRange, key_group_range

__all__ = ["placed"]


def placed(
    seen: Mapping[int, Sequence[Copy]], parallelism: int, max_parallelism: int
) -> dict[int, int]:
    """The subtask of each slot, all different.

    What is worth most is given away first: the newest copies, of most of the subtask's key groups,
    in most of its operators. Of what is worth the same, what has the fewest other places; then
    every slot has the subtask of its own number, as all have where nobody sees anything.

    Args:
        seen: by slot; all of them.
    """
    ranges = [key_group_range(i, parallelism, max_parallelism) for i in range(parallelism)]
    newest: dict[str, int] = {}
    for copies in seen.values():
        for one in copies:
            newest[one.operator] = max(newest.get(one.operator, -1), one.epoch)
    worth: dict[tuple[int, int], float] = {}
    for slot, copies in seen.items():
        for one in copies:
            held = KeyGroupRange(one.key_group_start, one.key_group_end)
            for subtask, wanted in enumerate(ranges):
                share = len(held.intersection(wanted)) / max(1, len(wanted))
                if share:
                    behind = newest[one.operator] - one.epoch
                    key = slot, subtask
                    worth[key] = worth.get(key, 0.0) + share / (1 + behind)
    of_slot = Counter(slot for slot, _ in worth)
    of_subtask = Counter(subtask for _, subtask in worth)

    def order(pair: tuple[int, int]) -> tuple[float, int, bool, tuple[int, int]]:
        slot, subtask = pair
        return -worth[pair], of_slot[slot] + of_subtask[subtask], slot != subtask, pair

    given: dict[int, int] = {}
    free = set(range(parallelism))
    for slot, subtask in sorted(worth, key=order):
        if slot not in given and subtask in free:
            given[slot] = subtask
            free.remove(subtask)
    for slot in sorted(seen):  # whose own number is free has it, before others look for one
        if slot not in given and slot in free:
            given[slot] = slot
            free.remove(slot)
    for slot in sorted(seen):
        if slot not in given:
            given[slot] = min(free)
            free.remove(given[slot])
    return given
