"""How values go into histories and come out: as pydantic's JSON, by encoders that the whole process shares.

For every client of Temporal. The SDK makes a converter for each workflow that it loads, and pydantic's own would then
examine the same types anew for each, which took a sixteenth of a busy worker's time.
"""

from __future__ import annotations

import dataclasses

from temporalio.contrib.pydantic import PydanticPayloadConverter, pydantic_data_converter
from temporalio.converter import CompositePayloadConverter

# Safe to share: they keep nothing of a value, and of a type what follows from the type alone.
_ENCODERS = tuple(PydanticPayloadConverter().converters.values())


class SharedPayloadConverter(CompositePayloadConverter):
    """pydantic's converter, new in name only."""

    def __init__(self) -> None:
        super().__init__(*_ENCODERS)


data_converter = dataclasses.replace(pydantic_data_converter, payload_converter_class=SharedPayloadConverter)
