"""What the sink was given for a batch is what the model gives, and no batch is missing."""

from __future__ import annotations

from tests.sim.checkers.ledger import Checker
from tests.sim.location import Committed, State, difference

__all__ = ["Output"]


class Output(Checker):
    """Compares committed output with the plain model."""

    name = "output"

    def committed(self, committed: Committed, model: State) -> None:
        """Called at the moment when Spark commits a batch."""
        batch = committed.plan.batch
        commits = self.world.shared.commits
        if batch and batch - 1 not in commits and not self.world.config.zombies:
            self.violated(f"batch {batch} is committed, and batch {batch - 1} is not")
        if committed.output is None:
            return
        if committed.output != model:
            self.violated(
                f"batch {batch}: what the sink was given is not what the input makes: "
                f"{difference(committed.output, model)}"
            )
