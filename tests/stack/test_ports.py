"""Ports stay what they were, unless somebody else took them."""

from __future__ import annotations

import socket

from stack.ports import choose, is_free


def listener(port: int = 0) -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_ports_differ_are_free_and_lie_below_the_range_of_outgoing_connections() -> None:
    chosen = choose([f"p{i}" for i in range(20)], {})
    assert len(set(chosen.values())) == 20
    assert all(is_free(port) and 10240 <= port < 61000 for port in chosen.values())


def test_a_kept_port_stays_and_a_taken_one_is_chosen_anew() -> None:
    kept = choose(["a", "b"], {})
    with listener(kept["a"]):
        again = choose(["a", "b"], kept)
    assert again["b"] == kept["b"]
    assert again["a"] != kept["a"]


def test_a_port_kept_for_something_else_is_not_given_away() -> None:
    kept = choose(["a"], {})
    chosen = choose(["b"], kept, {"b": kept["a"]})
    assert chosen["a"] == kept["a"]
    assert chosen["b"] != kept["a"]


def test_the_preferred_port_is_taken_when_free() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        assert choose(["a"], {}, {"a": port})["a"] != port
    assert choose(["a"], {}, {"a": port})["a"] == port
