"""What a vendor's file in this folder offers to the watcher, a process of its own: looks at the hardware, and waits
for news of it. A source may block, raise or even crash; the watcher's parent notices each.
"""

from __future__ import annotations

from typing import Protocol

from planning.devices.cards import Sight, Vendor


class Source(Protocol):
    """One vendor's cards on this machine."""

    @property
    def vendor(self) -> Vendor: ...

    def look(self) -> Sight:
        """Everything there is now; an empty Sight where there is no such hardware. Raises HardwareError."""

    def wait(self, seconds: float) -> None:
        """Returns when something happened that is worth a look (a card came or went, an error was reported), or after
        so many seconds.
        """

    def close(self) -> None:
        """Lets go of the driver."""
