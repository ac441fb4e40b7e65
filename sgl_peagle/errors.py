"""The one way this package says no: what is wrong, why it matters, what to do instead."""

from __future__ import annotations


class PEagleError(ValueError):
    """A configuration or a file that cannot be served.

    Args:
        what: The fact that was found, naming the flag, file, key or tensor.
        why: Why it cannot be served.
        fix: What the user can do instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
