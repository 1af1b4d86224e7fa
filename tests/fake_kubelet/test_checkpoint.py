"""The checkpoint against what Go's encoding/json and go-spew made of the same values, and against bad files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_kubelet.checkpoint import Allocated, Corrupt, decode, encode

# Printed by Go with the kubelet's types (package checkpoint), its JSON encoder and dump.ForHash.
EMPTY = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}'
FULL = (
    '{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"c0","ResourceName":"tenstorrent.com/n150",'
    '"DeviceIDs":{"-1":["a b","c"],"0":["x"],"10":["t"],"2":["ü","d"]},"AllocResp":"CgD/Ig=="},{"PodUID":"uid-2",'
    '"ContainerName":"c0","ResourceName":"b.com/x","DeviceIDs":{"-1":["z"]},"AllocResp":""}],"RegisteredDevices":'
    '{"a.b/y":["\\"q\\"\\n\\u003c\\u0026\\u003e"],"b.com/x":[],"tenstorrent.com/n150":["c","a b"]}},'
    '"Checksum":2124273495}'
).encode()
ALLOCATED = [
    Allocated(
        "uid-1",
        "c0",
        "tenstorrent.com/n150",
        {-1: ["a b", "c"], 10: ["t"], 2: ["ü", "d"], 0: ["x"]},
        bytes([10, 0, 255, 34]),
    ),
    Allocated("uid-2", "c0", "b.com/x", {-1: ["z"]}, b""),
]
REGISTERED = {"tenstorrent.com/n150": ["c", "a b"], "b.com/x": [], "a.b/y": ['"q"\n<&>']}


def test_the_file_is_the_kubelets_byte_for_byte() -> None:
    assert encode([], {}) == EMPTY
    assert encode(ALLOCATED, REGISTERED) == FULL


def test_a_file_of_a_kubelet_can_be_read() -> None:
    assert decode(EMPTY) == ([], {})
    assert decode(FULL) == (ALLOCATED, REGISTERED)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
lists = st.lists(texts, max_size=3)
entries = st.builds(
    Allocated, texts, texts, texts, st.dictionaries(st.integers(-1, 99), lists, max_size=3), st.binary(max_size=9)
)


@given(st.lists(entries, max_size=3), st.dictionaries(texts, lists, max_size=3))
def test_what_is_written_is_read(allocated: list[Allocated], registered: dict[str, list[str]]) -> None:
    assert decode(encode(allocated, registered)) == (allocated, registered)


@pytest.mark.parametrize(
    "blob",
    [b"", b"{", b"[]", b"null", b"{}", b'{"Data":{}}', b"\xff", FULL.replace(b"2124273495", b"2124273496")],
)
def test_a_bad_file_is_refused(blob: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(blob)


@given(st.recursive(st.none() | st.integers() | texts, lambda of: st.lists(of) | st.dictionaries(texts, of)))
def test_whatever_stands_there_it_is_read_or_refused(value: object) -> None:
    for data in (value, {"PodDeviceEntries": value, "RegisteredDevices": {}}, {"PodDeviceEntries": [value]}):
        with pytest.raises(Corrupt):
            decode(json.dumps({"Data": data, "Checksum": 1}).encode())
