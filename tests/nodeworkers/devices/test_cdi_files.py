"""CDI documents: whole, of ours alone, and written when they say something else."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from nodeworkers.devices.cdi_files import CdiError, CdiFiles

NVIDIA, TENSTORRENT = "berth.dev/nvidia", "berth.dev/tenstorrent"


def _document(kind: str, *names: str) -> dict[str, object]:
    return {"cdiVersion": "0.6.0", "kind": kind, "devices": [{"name": name, "containerEdits": {}} for name in names]}


DOCUMENTS: Mapping[str, Mapping[str, object]] = {
    NVIDIA: _document(NVIDIA, "GPU-1"),
    TENSTORRENT: _document(TENSTORRENT, "tt-1"),
}


def _listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_documents_are_files_that_anybody_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "cdi"
    before = os.umask(0o077)
    try:
        changed = CdiFiles(folder).write(DOCUMENTS)
    finally:
        os.umask(before)
    assert _listed(folder) == sorted(changed) == ["berth.dev-nvidia.json", "berth.dev-tenstorrent.json"]
    for kind, document in DOCUMENTS.items():
        path = folder / f"{kind.replace('/', '-')}.json"
        assert json.loads(path.read_text()) == document and stat.S_IMODE(path.stat().st_mode) == 0o644


def test_only_what_says_something_else_is_written(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    files.write(DOCUMENTS)
    before = {name: (tmp_path / name).stat().st_ino for name in _listed(tmp_path)}
    turned = {kind: dict(reversed(list(document.items()))) for kind, document in DOCUMENTS.items()}
    assert files.write(turned) == () == CdiFiles(tmp_path).write(DOCUMENTS)
    changed = files.write({**DOCUMENTS, NVIDIA: _document(NVIDIA, "GPU-1", "GPU-2")})
    after = {name: (tmp_path / name).stat().st_ino for name in _listed(tmp_path)}
    assert changed == ("berth.dev-nvidia.json",)
    assert [name for name in before if before[name] != after[name]] == ["berth.dev-nvidia.json"], "never in place"


def test_what_is_out_of_date_goes_and_what_is_others_stays(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    files.write(DOCUMENTS)
    (tmp_path / ".berth.dev-nvidia.json.new").write_text("half")  # of a process that was killed
    others = {
        "nvidia.yaml": "kind: nvidia.com/gpu",
        "k8s.tenstorrent.com-claim.json": "{}",
        "berth.dev-seats.yaml": "kind: berth.dev/seats",
        "berth.dev-byhand.json": '{"kind": "example.com/thing"}',
        "berth.dev-broken.json": "{",
        ".berth.dev-x.json.swp": "",
    }
    for name, content in others.items():
        (tmp_path / name).write_text(content)
    assert set(files.write({TENSTORRENT: DOCUMENTS[TENSTORRENT]})) == {
        "berth.dev-nvidia.json", ".berth.dev-nvidia.json.new",
    }  # fmt: skip
    assert _listed(tmp_path) == sorted([*others, "berth.dev-tenstorrent.json"])
    files.write({})
    assert _listed(tmp_path) == sorted(others)


def test_what_others_did_to_a_document_is_undone(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path / "cdi")
    files.write(DOCUMENTS)
    path, elsewhere = tmp_path / "cdi" / "berth.dev-nvidia.json", tmp_path / "precious"
    elsewhere.write_text("precious")
    path.write_text("{")
    assert files.write(DOCUMENTS) == (path.name,)
    path.chmod(0o600)
    assert files.write(DOCUMENTS) == (path.name,)
    path.unlink()
    path.symlink_to(elsewhere)
    assert files.write(DOCUMENTS) == (path.name,) and not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    assert files.write(DOCUMENTS) == (path.name,) and path.is_file()
    (tmp_path / "cdi" / f".{path.name}.new").symlink_to(elsewhere)
    path.unlink()
    assert path.name in files.write(DOCUMENTS)
    assert elsewhere.read_text() == "precious" and json.loads(path.read_text()) == DOCUMENTS[NVIDIA]


def test_what_cannot_be_written_is_said_and_the_rest_is_written(tmp_path: Path) -> None:
    (tmp_path / "berth.dev-nvidia.json").mkdir()
    with pytest.raises(CdiError, match=r"berth\.dev-nvidia\.json cannot be written: Is a directory\. Make room"):
        CdiFiles(tmp_path).write(DOCUMENTS)
    assert _listed(tmp_path) == ["berth.dev-nvidia.json", "berth.dev-tenstorrent.json"]
    assert json.loads((tmp_path / "berth.dev-tenstorrent.json").read_text()) == DOCUMENTS[TENSTORRENT]


def test_a_folder_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("")
    with pytest.raises(CdiError, match=r"cdi for CDI documents cannot be used: File exists\. Mount it into berth node"):
        CdiFiles(tmp_path / "cdi").write(DOCUMENTS)


@pytest.mark.parametrize("kind", ["nvidia.com/gpu", "berth.dev/", "berth.dev/../x", "berth.dev/a/b", "berth.dev", ""])
def test_a_kind_that_is_not_ours_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CdiError, match=r"is not a kind of berth\.dev"):
        CdiFiles(tmp_path / "cdi").write({kind: _document(kind), TENSTORRENT: DOCUMENTS[TENSTORRENT]})
    assert _listed(tmp_path / "cdi") == ["berth.dev-tenstorrent.json"] and _listed(tmp_path) == ["cdi"]


def test_who_reads_meanwhile_reads_a_whole_document(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    files.write(DOCUMENTS)
    path, stop, read = tmp_path / "berth.dev-nvidia.json", threading.Event(), list[int]()

    def reading() -> None:
        while not stop.is_set():
            read.append(len(json.loads(path.read_text())["devices"]))

    reader = threading.Thread(target=reading)
    reader.start()
    try:
        for number in range(50):
            files.write({NVIDIA: _document(NVIDIA, *map(str, range(1 + number * 20)))})
    finally:
        stop.set()
        reader.join()
    assert len(read) > 1 and all(each % 20 == 1 for each in read)
