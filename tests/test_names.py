"""The rooms are top-level packages, so nothing that is installed beside berth may bring one of their names."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions

import pytest

ROOMS = (
    "crds", "planning", "kube", "images", "workflows", "activities", "controller", "nodeworkers", "berth", "stack",
)  # fmt: skip


@pytest.fixture(scope="module")
def providers() -> dict[str, set[str]]:
    return {name: set(distributions) for name, distributions in packages_distributions().items()}


@pytest.mark.parametrize("room", ROOMS)
def test_no_dependency_ships_a_room(room: str, providers: dict[str, set[str]]) -> None:
    others = providers.get(room, set()) - {"berth"}
    assert not others, f"{', '.join(sorted(others))} installs a top-level package {room!r}: rename the room or drop it"


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_hides_a_module_of_python(room: str) -> None:
    assert room not in sys.stdlib_module_names


def test_the_check_sees_what_is_installed(providers: dict[str, set[str]]) -> None:
    assert "pydantic" in providers["pydantic"], (
        "packages_distributions() finds nothing, so the tests above prove nothing"
    )
