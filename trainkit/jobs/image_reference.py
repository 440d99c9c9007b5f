"""Names of container images, as registries know them.

The grammar is that of distribution/reference, reference.go ("Grammar"): [HOST[:PORT]/]PATH[:TAG]
[@DIGEST]. What stands before the first "/" is a host only if it has a dot or a colon, or is
localhost (splitDockerDomain there).
"""

from __future__ import annotations

import re

from trainkit.base.lazy_dataclasses import dataclass

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?")
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}"
_REST = re.compile(
    rf"(?P<path>{_PART}(?:/{_PART})*)(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{_DIGEST}))?"
)
LONGEST = 255  # characters of host and path together
WORDS = "[HOST[:PORT]/]NAME[:TAG][@DIGEST], NAME in lower case"


@dataclass(frozen=True)
class ImageReference:
    """An image's name in its parts.

    Args:
        host: of the registry; "" where the builder's own default counts.
        path: its name there.
        tag: "" where none is given.
        digest: ALGORITHM:HEX; "" where none is given.
    """

    host: str
    path: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        text = f"{self.host}/{self.path}" if self.host else self.path
        if self.tag:
            text += f":{self.tag}"
        if self.digest:
            text += f"@{self.digest}"
        return text


def parse_reference(text: str) -> ImageReference | None:
    """The parts of an image's name; None where it is none."""
    host, slash, rest = text.partition("/")
    if not (slash and ("." in host or ":" in host or host == "localhost")):
        host, rest = "", text
    elif not _HOST.fullmatch(host):
        return None
    found = _REST.fullmatch(rest)
    if found is None or len(host) + 1 + len(found["path"]) > LONGEST:
        return None
    return ImageReference(host, found["path"], found["tag"] or "", found["digest"] or "")


def objection_to(text: str) -> str:
    """What is wrong with an image's name, in words; "" where nothing is."""
    if parse_reference(text) is not None:
        return ""
    if "#" in text:
        return f"'{text}' is not an image reference: '#' is enroot's; a registry ends with '/' here"
    if "://" in text:
        return f"'{text}' is not an image reference: it has no scheme such as docker://"
    if text.lower() != text and parse_reference(text.lower()) is not None:
        return f"'{text}' is not an image reference: names are in lower case"
    return f"'{text}' is not an image reference: {WORDS}"
