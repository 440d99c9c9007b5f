"""What the API server answers when it refuses."""

from __future__ import annotations

from tests.kubernetes.kinds import Kind, Object

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Refused(Exception):
    """A request that is answered with a Status.

    Args:
        code: of HTTP. details: of the Status, such as `causes` or `retryAfterSeconds`.
    """

    def __init__(
        self, code: int, message: str, reason: str = "", details: Object | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, details or {}
        self.reason = reason or REASONS.get(code, "Unknown")

    def status(self) -> Object:
        """The object of kind Status."""
        status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}}
        status |= {"status": "Failure", "message": self.message, "reason": self.reason}
        if self.details:
            status["details"] = self.details
        return status | {"code": self.code}


def not_found(kind: Kind, name: str) -> Refused:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return Refused(404, f'{kind.qualified} "{name}" not found', details=details)


def exists(kind: Kind, name: str) -> Refused:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    message = f'{kind.qualified} "{name}" already exists'
    return Refused(409, message, "AlreadyExists", details)


def conflict(kind: Kind, name: str, why: str = "") -> Refused:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    why = why or (
        "the object has been modified; please apply your changes to the latest version and try"
        " again"
    )
    text = f'Operation cannot be fulfilled on {kind.qualified} "{name}": {why}'
    return Refused(409, text, details=details)


def invalid(kind: Kind, name: str, errors: list[tuple[str, str]]) -> Refused:
    """422. errors: (path of the field, what is wrong with it)."""
    causes = [
        {"reason": "FieldValueInvalid", "field": field, "message": text} for field, text in errors
    ]
    texts = [f"{field}: {text}" for field, text in errors]
    said = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details = {"name": name, "group": kind.group, "kind": kind.kind, "causes": causes}
    of = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    return Refused(422, f'{of} "{name}" is invalid: {said}', details=details)


def forbidden(kind: Kind, name: str, why: str) -> Refused:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    named = f'{kind.qualified} "{name}"' if name else kind.qualified
    return Refused(403, f"{named} is forbidden: {why}", details=details)


def expired(asked: int, oldest: int) -> Refused:
    return Refused(410, f"too old resource version: {asked} ({oldest})")
