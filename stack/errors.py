"""The one error the stack raises on purpose: what happened, to which object, and what a person can do about it.

For the command line, which prints it without a traceback, and for tests, which match on its text.
"""

from __future__ import annotations


class StackError(Exception):
    """Something outside this program is not as it must be; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message
