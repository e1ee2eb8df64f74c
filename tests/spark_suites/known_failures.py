"""The tests of Spark's that cannot pass here, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Tests that fail, all for one reason.

    Attributes:
        tests: their names.
        kind: `internals` (of Spark's, which our state does not have) or `difference` (a documented
            one, of docs/reference/compatibility.md).
        why: one sentence.
        text: what the failure must contain.
        modules: part of the names of the modules where they fail.
    """

    tests: tuple[str, ...]
    kind: str
    why: str
    text: str
    modules: tuple[str, ...] = ("",)


KNOWN: tuple[Known, ...] = (
    Known(
        ("test_transform_with_state_query_restarts",),
        "internals",
        "reads `stateOperators` of Spark's progress, which has no operator of ours",
        "stateOperators[0]",
    ),
    Known(
        ("test_transform_with_list_state_metadata", "test_transform_with_value_state_metadata"),
        "internals",
        "reads Spark's state files (`state-metadata`) in the checkpoint location",
        'metadata_df.select("operatorProperties")',
    ),
    Known(
        (
            "test_transform_with_state_restart_with_multiple_rows_init_state",
            "test_transform_with_state_with_timers_single_partition",
        ),
        "internals",
        "reads Spark's state files (`statestore`) in the checkpoint location",
        "IllegalArgumentException: requirement failed",
        modules=("state_variable",),
    ),
    Known(
        ("test_schema_evolution_scenarios",),
        "difference",
        "takes the first row of a batch to be that of the first key",
        'assert result.value["id"] == 0  # First ID',
    ),
    Known(
        ("test_schema_evolution_fails",),
        "difference",
        "goes on with a class of another name, which is another operator here (`SB1007`)",
        "[SB1007]",
    ),
)
