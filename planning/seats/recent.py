"""Measures what a GroupView tells, for whoever fills one in: time within a window that moves on, how long seats are
asked.
"""

from __future__ import annotations

from collections import deque

_LEAST_LATE, _MOST_LATE = 0.1, 100.0
_NEWER = 0.1  # how much the newest counts
_FORGOTTEN = 0.01
_PARTS = 60


class Recent:
    """Stretches, added in the order in which they ended. Times are seconds on any one clock."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._stretches: deque[tuple[float, float]] = deque()
        self._whole = 0.0

    def add(self, begin: float, end: float) -> None:
        self._stretches.append((begin, end))
        self._whole += end - begin

    def within(self, now: float) -> float:
        """Seconds of them that are no older than the window."""
        since = now - self._window
        while self._stretches and self._stretches[0][1] <= since:
            begin, end = self._stretches.popleft()
            self._whole -= end - begin
        if not self._stretches:
            self._whole = 0.0
            return 0.0
        return max(0.0, self._whole - max(0.0, since - self._stretches[0][0]))


class Share:
    """Stretches that may be many and short, within a window that moves on: by sixtieths of it, and no larger however
    many there were.
    """

    def __init__(self, window: float) -> None:
        self._step = max(window, 1.0) / _PARTS
        self._parts: deque[tuple[int, float]] = deque()

    def add(self, begin: float, end: float) -> None:
        """In the order in which they ended."""
        begin = max(begin, end - self._step * _PARTS)
        for part in range(int(begin // self._step), int(end // self._step) + 1):
            seconds = min(end, (part + 1) * self._step) - max(begin, part * self._step)
            if seconds <= 0:
                continue
            if self._parts and self._parts[-1][0] >= part:
                last, before = self._parts.pop()
                self._parts.append((last, before + seconds))
            else:
                self._parts.append((part, seconds))

    def within(self, now: float) -> float:
        """Seconds of them that are no older than the window, to a sixtieth of it."""
        since = int(now // self._step) - _PARTS
        while self._parts and self._parts[0][0] <= since:
            self._parts.popleft()
        return sum(seconds for _, seconds in self._parts)


class Asked:
    """For how long a seat is asked without a pause, once it is: `SeatView.busy`."""

    def __init__(self) -> None:
        self._seconds = self._ends = 0.0

    def ended(self, seconds: float, *, cut: bool) -> None:
        """It was asked for so long. `cut`: until a switch took the slot from it. Nobody knows how long that would have
        gone on, so its time counts and its end does not.
        """
        self._seconds += _NEWER * (seconds - self._seconds)
        self._ends += _NEWER * ((not cut) - self._ends)

    @property
    def mean(self) -> float | None:
        """Seconds; None if it never ended of itself as far as somebody remembers."""
        return self._seconds / self._ends if self._ends > _FORGOTTEN else None


class Late:
    """By what waits that were told are to be corrected so that they are true in the mean: `SeatView.late`.

    Whoever ranks before a seat, and comes after it, is in no plan; how often that is, only what happened tells.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._took: float | None = None

    def served(self, told: float, took: float) -> None:
        """Somebody was told so many seconds, and it took so many."""
        self._took = took if self._took is None else self._took + _NEWER * (took - self._took)
        wrong = (took - told) / self._took if self._took > 0 else 0.0
        self.factor = min(max(self.factor + _NEWER * wrong, _LEAST_LATE), _MOST_LATE)
