"""[notify]: who is notified when a run ends, fails, stalls or goes on."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from trainkit.jobs.table import VARIABLE, Strings, Table, wrong

Occasion = Literal["end", "failure", "stall", "recovery"]
OCCASIONS: tuple[Occasion, ...] = get_args(Occasion)


class NotifySettings(Table):
    """Sent by the run's supervisor. What is secret is named here and lies in the environment."""

    command: Strings = Field(
        (), description="a program and its arguments, which gets the text on its standard input"
    )
    webhook: str | None = Field(
        None,
        pattern=r"^https?://",
        description='a URL that gets {"text": ...} by POST; for a secret one webhook_variable',
    )
    webhook_variable: str | None = Field(
        None,
        pattern=VARIABLE + "$",
        description="name of the environment variable that holds the URL, as Slack's is a secret",
    )
    token_variable: str | None = Field(
        None,
        pattern=VARIABLE + "$",
        description="name of the variable with the token of Authorization: Bearer",
    )
    occasions: Annotated[tuple[Occasion, ...], Field(strict=False)] = Field(
        OCCASIONS, description="when: end, failure, stall, recovery"
    )
    timeout: float = Field(
        10.0, gt=0, le=60, description="seconds that one message may take; then it is given up"
    )

    @model_validator(mode="after")
    def _has_one_url(self) -> NotifySettings:
        if self.webhook and self.webhook_variable:
            raise wrong("webhook", "webhook and webhook_variable exclude each other")
        if self.token_variable and not (self.webhook or self.webhook_variable):
            raise wrong("token_variable", "token_variable is for a webhook, which is not given")
        return self

    @property
    def active(self) -> bool:
        """Whether anybody is notified."""
        return bool(self.command or self.webhook or self.webhook_variable) and bool(self.occasions)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Variables whose values are written nowhere."""
        names = (self.webhook_variable, self.token_variable)
        return tuple(name for name in names if name and self.active)
