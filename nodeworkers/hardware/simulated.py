"""GPUs that are not there, for `berth node --simulated-gpus 2xH100`: what they are follows from a short text, and their
ids and driver say that they are simulated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planning.caches.compatibility import GPU

SIMULATED = "simulated"
MOST = 64  # GPUs of one node
# Product -> backend, architecture, warp size.
PRODUCTS: dict[str, tuple[str, str, int]] = {
    "T4": ("cuda", "75", 32),
    "A100": ("cuda", "80", 32),
    "L4": ("cuda", "89", 32),
    "L40S": ("cuda", "89", 32),
    "H100": ("cuda", "90", 32),
    "H200": ("cuda", "90", 32),
    "MI210": ("hip", "gfx90a", 64),
    "MI300X": ("hip", "gfx942", 64),
}
_PART = re.compile(r"([0-9]{1,4})x([A-Za-z0-9]+)")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A provider of GPUs as `simulated_gpus` reads them."""

    text: str

    def __post_init__(self) -> None:
        simulated_gpus(self.text)

    @property
    def simulated(self) -> bool:
        return True

    def gpus(self) -> tuple[GPU, ...]:
        return simulated_gpus(self.text)


def simulated_gpus(text: str) -> tuple[GPU, ...]:
    """`4xMI210,1xA100`: counts and products, as GPUs `simulated-0`, `simulated-1`, … in that order. Raises ValueError,
    with a sentence.
    """
    products = [product for part in text.split(",") for product in _products(part.strip())]
    if len(products) > MOST:
        raise ValueError(f"{text!r} are {len(products)} simulated GPUs; a node has at most {MOST}.")
    return tuple(
        GPU(f"{SIMULATED}-{index}", product, *PRODUCTS[product], SIMULATED) for index, product in enumerate(products)
    )


def _products(part: str) -> list[str]:
    match = _PART.fullmatch(part)
    product = match[2].upper() if match else ""
    if match is None or product not in PRODUCTS or not 0 < int(match[1]) <= MOST:
        raise ValueError(
            f"{part!r} names no simulated GPUs: write a count from 1 to {MOST} and a product, like 2xH100 or "
            f"4xMI210,1xA100. Products are {', '.join(sorted(PRODUCTS))}."
        )
    return [product] * int(match[1])
