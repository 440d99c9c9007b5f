"""What a failure means: the first rule that fits gives its class, whether the host is suspected,
and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster, FailureRule

BUILT_IN = Path(__file__).with_name("failure_rules.toml")


@dataclass(frozen=True)
class FailureRules:
    """FailureRules by name, in the order they are tried."""

    rules: Mapping[str, FailureRule]

    def find(self, said: str, last: Sequence[str]) -> FailureRule | None:
        """The first rule that fits what the rank said of itself; else the first that fits one of
        its last lines; else None."""
        lines = "\n".join(last)
        return next(
            (
                rule
                for text in (said, lines)
                for rule in self.rules.values()
                if re.search(rule.match, text)
            ),
            None,
        )


def load_failure_rules(cluster: Cluster) -> FailureRules:
    """The cluster's own rules, then those that come with trainkit; one of the same name replaces
    the latter."""
    with open(BUILT_IN, "rb") as file:
        built_in = {
            name: FailureRule.model_validate(rule) for name, rule in tomli.load(file).items()
        }
    return FailureRules(
        {
            **cluster.failures,
            **{name: rule for name, rule in built_in.items() if name not in cluster.failures},
        }
    )
