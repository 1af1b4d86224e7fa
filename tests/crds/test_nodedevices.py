"""What the API server takes of a node: counts that can be added up."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from crds.gpuseatprofile import MOST_GROUPS, MOST_SEATS
from crds.nodedevices import NodeDevicesStatus


def test_no_node_has_more_groups_and_seats_than_there_can_be() -> None:
    most = {"groups": MOST_GROUPS, "seats": MOST_GROUPS * MOST_SEATS}
    NodeDevicesStatus.model_validate({"seats": {"source": "GPUSeatProfile pairs", **most}})
    for key in ("groups", "seats"):
        with pytest.raises(ValidationError, match=rf"{key}\n.*less than or equal"):
            NodeDevicesStatus.model_validate({"seats": {"source": "s", **most, key: most[key] + 1}})
