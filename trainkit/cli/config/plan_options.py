"""What the options of `plan` come to."""

from __future__ import annotations

import json

from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.options import PlanOptions


def usage(message: str) -> TrainkitError:
    """An error of the command line."""
    return TrainkitError(message, exit=Exit.USAGE)


def overrides(options: PlanOptions, nodes: list[int]) -> list[str]:
    """Options as --set has them; of a range the first number of nodes."""
    given = [f"cluster={json.dumps(options.cluster)}"] if options.cluster else []
    if nodes:
        given.append(f"nodes={nodes[0]}")
    return [*given, *options.set]


def asked_nodes(options: PlanOptions) -> list[int]:
    """The numbers of nodes that --nodes asks for: one, or of a range its ends and every doubling
    of the first between them; none where the job decides.

    Raises TrainkitError (exit 1): it is neither.
    """
    text = options.nodes
    first, dots, last = text.partition("..")
    if not text or text == "0":
        return []
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise usage(f"--nodes takes a whole number, or with --search a range (2..64), not '{text}'")
    low = int(first)
    high = int(last) if dots else low
    if not 1 <= low <= high:
        raise usage(f"--nodes {text}: from 1, the lower number first")
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]
