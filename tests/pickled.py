"""A value that counts how often it is sent to another process."""

from __future__ import annotations


class Pickled:
    """A number that counts how often it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.times = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Become the bare number in another process."""
        self.times += 1
        return int, (self.number,)
