"""Taking files out of a pod's layer while the pod goes on changing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeworkers.csi import export
from nodeworkers.csi.export import Compiled, ExportError, compiled


@pytest.mark.parametrize("swapped", ["link", "fifo", "gone"])
def test_a_file_that_became_something_else_is_left_out(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper, secret = tmp_path / "upper", tmp_path / "secret"
    upper.mkdir()
    secret.write_text("the node's")
    (upper / "kernel").write_text("ours")
    if swapped == "link":
        (upper / "link").symlink_to(secret)
    elif swapped == "fifo":
        os.mkfifo(upper / "fifo")
    regular, listed = os.stat(secret), os.listdir(upper)
    monkeypatch.setattr(os, "stat", lambda name, **_: regular)
    monkeypatch.setattr(os, "listdir", lambda _: [*listed, "gone"])
    assert compiled(upper) == [Compiled("kernel", 4)]


def test_names_and_numbers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    assert len(compiled(tmp_path)) == 3
    monkeypatch.setattr(export, "ENTRIES", 2)
    with pytest.raises(ExportError, match="more than 2 entries"):
        compiled(tmp_path)
    monkeypatch.undo()
    os.rename(tmp_path / "a", os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(ExportError, match="a name that is no text"):
        compiled(tmp_path)
