"""The rank of a run that computes longer than the others do, by its newest row of metrics."""

from __future__ import annotations

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import newest_row
from trainkit.runs.world import read_world


@dataclass(frozen=True)
class SlowRank:
    """Which it is, on which host, and how many times as long as the others it computes."""

    rank: int
    host: str
    times: float

    def in_words(self) -> str:
        """A line for people."""
        longer = f"{100 * (self.times - 1):.0f} %"
        return f"rank {self.rank} on {self.host} computes {longer} slower than the others"


def slow_rank(run: RunFolder) -> SlowRank | None:
    """The rank that was slow in the last steps; None where none was.

    Raises as `read_world` does.
    """
    row = newest_row(run.metrics)
    ranks = row.get("ranks", {}) if row else {}
    if "slow" not in ranks:
        return None
    rank = int(ranks["slow"])
    node = read_world(run).node_of(rank)
    return SlowRank(rank, node.host if node else "?", ranks["slow_times"])
