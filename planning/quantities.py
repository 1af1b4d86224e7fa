"""Reads Kubernetes quantities exactly ("500m", "4Gi", "1e3"): the one place where text becomes a number of something.

For views and manifests. Nothing is rounded but at the very end, and then up, as the kubelet and the scheduler do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache

_PATTERN = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,20})?|\.[0-9]{1,20}))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_BINARY = {f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
}
_EXACT = Context(prec=160)
MEBIBYTE = 2**20
_MAX = 2**63 - 1  # Kubernetes caps quantities there


def quantity(value: object) -> Decimal:
    """The exact number that `value` (text or integer) stands for; ValueError if it is no quantity."""
    if isinstance(value, bool):
        raise ValueError("a quantity is a number or text")
    if isinstance(value, int):
        return Decimal(value)
    if isinstance(value, float):
        value = repr(value)
    if not isinstance(value, str):
        raise ValueError("a quantity is a number or text")
    return _parsed(value)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Decimal:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:64]!r} is not a quantity")
    number, suffix = Decimal(match[1]), match[2]
    if not suffix:
        return number
    unit = _BINARY.get(suffix) or _DECIMAL.get(suffix) or Decimal(10) ** int(suffix[1:])
    return _EXACT.multiply(number, unit)


def whole(value: object, unit: Decimal = Decimal(1)) -> int:
    """`value` in whole `unit`s, rounded up; 0 when it is no quantity, never negative, at most 2**63 - 1."""
    try:
        number = _EXACT.divide(quantity(value), unit)
    except ValueError:
        return 0
    if number <= 0:
        return 0
    return int(min(number.to_integral_value(rounding=ROUND_CEILING, context=_EXACT), Decimal(_MAX)))


def milli(value: object) -> int:
    """`value` in thousandths, rounded up."""
    return whole(value, _DECIMAL["m"])


def amount(name: str, value: object) -> int:
    """A resource's amount in berth's units: CPU in millicores, all else in its own."""
    return milli(value) if name == "cpu" else whole(value)


def amounts(raw: object) -> dict[str, int]:
    """A resource list (`{"cpu": "500m", ...}`) in berth's units; anything else gives an empty one."""
    if not isinstance(raw, Mapping):
        return {}
    return {str(name): amount(str(name), value) for name, value in raw.items()}
