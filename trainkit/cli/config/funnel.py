"""What curation let through, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from trainkit.cli.tables import Listing, Page

BAR = 30  # columns of the longest bar


def funnel_page(curation: Mapping[str, Any]) -> Page:
    """What each step let through, and its three most frequent reasons."""
    yield (
        f"{curation['name']}: {curation['lines']:,} documents were read,"
        f" {curation['documents']:,} are written"
    )
    right = ("in", "out", "kept", "text MB")
    table = Listing(
        *("step", *right, "funnel", "left out, by reason"),
        right=right,
        drop=("text MB", "funnel"),
    )
    most = max((step["documents_in"] for step in curation["steps"]), default=1)
    for step in curation["steps"]:
        into, out = step["documents_in"], step["documents_out"]
        reasons = sorted(step["reasons"].items(), key=lambda each: (-each[1], each[0]))
        words = [f"{count:,} {reason}" for reason, count in reasons[:3]]
        if more := sum(count for _, count in reasons[3:]):
            words.append(f"{more:,} others")
        table.add_row(
            step["step"],
            f"{into:,}",
            f"{out:,}",
            f"{out / max(1, into):.1%}",
            f"{step['bytes_out'] / 1e6:,.1f}",
            "#" * round(BAR * out / max(1, most)),
            escape(", ".join(words)),
        )
    yield table
