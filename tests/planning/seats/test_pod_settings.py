"""What a pod says of its server: read, and told where it makes no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from planning.seats import pod_settings as words
from planning.seats.endpoints import PORT_ANNOTATION
from planning.seats.pod_settings import PodSettings, pod_settings

ALL = {
    PORT_ANNOTATION: "8000", words.NAME: "chat", words.PRIORITY: "-5", words.WEIGHT: "2.5", words.PIN: "true",
    words.MODELS: "llama, qwen,llama", words.DEADLINE: "30", words.QUEUE: "0", words.KEEPALIVE: "15",
    words.PROTOCOL: "h2c", words.DRAIN: "0", words.HEALTH: "/ready",
}  # fmt: skip


def test_all_of_it_is_read() -> None:
    assert pod_settings(ALL) == PodSettings(
        8000, "chat", -5, 2.5, True, ("llama", "qwen"), 30.0, 0, 15.0, True, 0.0, "/ready"
    )


def test_a_pod_that_says_nothing_has_no_port() -> None:
    assert pod_settings({}) == PodSettings()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (PORT_ANNOTATION, "0"), (PORT_ANNOTATION, "65536"), (PORT_ANNOTATION, "http"), (PORT_ANNOTATION, "9" * 5000),
        (words.NAME, ""), (words.NAME, "a\nb"), (words.PRIORITY, "1.5"), (words.WEIGHT, "0"), (words.WEIGHT, "nan"),
        (words.WEIGHT, "inf"), (words.PIN, "yes"), (words.MODELS, ","), (words.MODELS, ",".join(map(str, range(17)))),
        (words.DEADLINE, "0"), (words.DEADLINE, "1e9"), (words.QUEUE, "-1"), (words.KEEPALIVE, "0.1"),
        (words.PROTOCOL, "grpc"), (words.DRAIN, "-1"), (words.HEALTH, "health"), (words.HEALTH, "/a b"),
    ],
)  # fmt: skip
def test_a_word_that_makes_no_sense_is_told_and_the_others_count(key: str, told: str) -> None:
    found = pod_settings(ALL | {key: told})
    assert [each.partition(":")[0] for each in found.problems] == [key]
    rest = {name: value for name, value in ALL.items() if name != key}
    assert replace(found, problems=()) == pod_settings(rest)


@given(some.dictionaries(some.sampled_from(sorted(ALL)), some.text(max_size=40)))
def test_whatever_is_written_there_does_no_harm(annotations: dict[str, str]) -> None:
    found = pod_settings(annotations)
    assert 0 <= found.port <= 65535 and found.weight > 0 and 1 <= found.deadline <= 86_400 and found.queue >= 0
    assert len(found.problems) <= len(annotations)
