"""Files of http:// and https:// servers."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trainkit.base.errors import Exit, TrainkitError
from trainkit.data.fetch.retry import (
    FetchRetryPolicy,
    RemoteFileChanged,
    RemoteFileInfo,
    TransientError,
    Unreachable,
)

if TYPE_CHECKING:
    import httpx2

GONE = {404, 410}
PASSING = {408, 425, 429, 500, 502, 503, 504}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_TOTAL = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+|\*)")
# no such host; not whom it says it is
_HOPELESS = ("[Errno -2]", "[Errno -5]", "CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")


def http_client(retry: FetchRetryPolicy, connections: int = 1) -> httpx2.Client:
    """A pool of connections. Proxies are taken from the usual variables of the environment."""
    import httpx2

    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    # lengths and sums are those of the file as it lies there
    headers = {"Accept-Encoding": "identity", "User-Agent": "trainkit"}
    return httpx2.Client(
        headers=headers, timeout=retry.timeout, limits=limits, follow_redirects=True
    )


class HttpFile:
    """One address.

    Args:
        url: http:// or https://, without a user or a password.
        pool: what `http_client` gave.
        token: the access token itself, or None. It is sent to the address's own host only, and
            never over plain HTTP to another machine.
        token_name: the variable it came from, for messages.
    """

    def __init__(
        self, url: str, pool: httpx2.Client, token: str | None = None, token_name: str | None = None
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.pool = pool
        self.token_name = token_name
        self.shown = parts._replace(query="").geturl()
        if token and parts.scheme != "https" and parts.hostname not in LOOPBACK:
            raise TrainkitError(
                f"{self.shown}: the token would be readable on its way",
                exit=Exit.STAGE_FAILED,
                hint="use https://, or take `token` away",
            )
        if token:
            self.headers = {"Authorization": f"Bearer {token}"}
        else:
            self.headers = {}

    def look(self) -> RemoteFileInfo | None:
        with self._errors():
            response = self.pool.head(self.url, headers=self.headers, follow_redirects=False)
            if response.is_redirect and "x-linked-size" not in response.headers:
                response = self.pool.head(self.url, headers=self.headers)
        # servers, and signed addresses, that take GET alone
        if response.status_code in (403, 405, 501):
            return self._look_by_get()
        if response.status_code in GONE:
            return None
        if not response.is_redirect:
            self._refuse(response)
        return _seen(response)

    def _look_by_get(self) -> RemoteFileInfo | None:
        with (
            self._errors(),
            self.pool.stream(
                "GET", self.url, headers={**self.headers, "Range": "bytes=0-0"}
            ) as response,
        ):
            if response.status_code in GONE:
                return None
            if response.status_code == 416:  # an empty file has no first byte
                return RemoteFileInfo(0)
            self._refuse(response)
            return _seen(response)

    def blocks(self, start: int, known: RemoteFileInfo) -> Iterator[bytes]:
        headers = dict(self.headers)
        if start:
            headers["Range"] = f"bytes={start}-"
            if (etag := known.etag) and not etag.startswith("W/"):
                headers["If-Range"] = etag
        with self._errors(), self.pool.stream("GET", self.url, headers=headers) as response:
            if response.status_code in GONE:
                raise RemoteFileChanged("no file any more")
            if response.status_code == 416:
                raise RemoteFileChanged(f"fewer than {start:,} bytes")
            self._refuse(response)
            if change := known.difference(_seen(response)):
                raise RemoteFileChanged(change)
            skip = self._skip(response, start)
            first = start == 0
            # of any size: a larger block would be lost half when the connection breaks
            for block in response.iter_raw():
                if (
                    first
                    and block.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html"))
                    and not _is_page(self.url)
                ):
                    raise self._page()
                first = False
                if skip < len(block):
                    yield block[skip:]
                skip = max(0, skip - len(block))

    def _skip(self, response: httpx2.Response, start: int) -> int:
        """Bytes to leave out: a server without ranges sends the whole file again."""
        if response.status_code == 206:
            span = _TOTAL.match(response.headers.get("content-range", ""))
            if span is None or int(span["first"]) != start:
                raise TrainkitError(
                    f"{self.shown}: asked for bytes from {start}, sent"
                    f" {response.headers.get('content-range')!r}",
                    exit=Exit.STAGE_FAILED,
                )
            return 0
        if "content-length" not in response.headers and "transfer-encoding" not in response.headers:
            raise TrainkitError(
                f"{self.shown}: the server does not say how long the file is",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "without a length nobody can tell whether all of it came: take it from another"
                    " server"
                ),
            )
        return start

    def _refuse(self, response: httpx2.Response) -> None:
        """Raise for every answer that is not the file."""
        code = response.status_code
        if code in PASSING:
            raise TransientError(
                f"the server answered {code} {response.reason_phrase}",
                _retry_after(response.headers.get("retry-after")),
            )
        if code in (401, 403):
            if self.headers:
                ours = f"the token in {self.token_name} was not enough"
            else:
                ours = 'name the variable that holds a token: token = "HF_TOKEN"'
            raise TrainkitError(
                f"{self.shown}: the server answered {code}: access is refused",
                exit=Exit.STAGE_FAILED,
                hint=(
                    f"{ours}; where terms must be accepted first, do so on the page of the dataset"
                ),
            )
        if code not in (200, 206):
            raise TrainkitError(
                f"{self.shown}: the server answered {code} {response.reason_phrase}",
                exit=Exit.STAGE_FAILED,
            )
        if response.headers.get("content-type", "").startswith("text/html") and not _is_page(
            self.url
        ):
            raise self._page()
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity" and not self.shown.endswith(".gz"):
            raise TrainkitError(
                f"{self.shown}: the server insists on sending it as {encoding}",
                exit=Exit.STAGE_FAILED,
                hint="take it from another server",
            )

    def _page(self) -> TrainkitError:
        hint = "open the address in a browser: it may want a login, or the file has moved"
        return TrainkitError(
            f"{self.shown}: the server sent a web page instead of the file",
            exit=Exit.STAGE_FAILED,
            hint=hint,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (
            httpx2.UnsupportedProtocol,
            httpx2.InvalidURL,
            httpx2.TooManyRedirects,
            httpx2.LocalProtocolError,
        ) as error:
            raise TrainkitError(
                f"{self.shown}: {type(error).__name__}: {_first_line(error)}",
                exit=Exit.STAGE_FAILED,
            ) from None
        except httpx2.TransportError as error:
            why = f"{type(error).__name__}: {_first_line(error)}"
            if any(word in why for word in _HOPELESS):
                raise Unreachable(
                    f"{self.shown}: {why}", "look at the address, and at the network"
                ) from None
            raise TransientError(why) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or "no more is known"


def _is_page(url: str) -> bool:
    return urlsplit(url).path.endswith((".html", ".htm"))


def _seen(response: httpx2.Response) -> RemoteFileInfo:
    """What the headers say of the whole file. Hubs name size and SHA-256 themselves (X-Linked-*)
    before they send one on to another host."""
    headers = response.headers
    etag = headers.get("x-linked-etag", "").strip('"')
    if "x-linked-size" in headers:
        return RemoteFileInfo(
            int(headers["x-linked-size"]),
            sha256=etag if re.fullmatch("[0-9a-f]{64}", etag) else None,
        )
    size: str | None = headers.get("content-length")
    if response.status_code == 206:
        span = _TOTAL.match(headers.get("content-range", ""))
        size = span["total"] if span and span["total"] != "*" else None
    return RemoteFileInfo(
        int(size) if size and size.isdigit() else None,
        headers.get("etag"),
        headers.get("last-modified"),
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After, which is a number of them or a date. Source: RFC 9110, 10.2.3."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    now = datetime.datetime.now(datetime.UTC)
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or datetime.UTC) - now).total_seconds())
