"""Node manifests, images, progress: parts that need nothing outside."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from stack import Lines, SimulatedNode, StackError, Terminal, node_manifest, node_manifests
from stack.kwok import configuration
from stack.node_images import Entry, docker_archive
from stack.options import UpOptions
from stack.paths import Layout, is_locked, locked, write_atomic
from stack.plan import needed_tools, port_names


def test_a_simulated_node_says_that_it_is_one_and_has_its_gpus() -> None:
    node = node_manifest(SimulatedNode("n1", 8, "NVIDIA-A100", cpu=96, memory=512, labels={"zone": "a"}))
    assert node["metadata"]["annotations"]["kwok.x-k8s.io/node"] == "fake"
    assert node["metadata"]["labels"]["gpu.warp.dev/simulated"] == "true"
    assert node["metadata"]["labels"]["nvidia.com/gpu.product"] == "NVIDIA-A100"
    assert node["metadata"]["labels"]["zone"] == "a"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert node["status"]["capacity"]["memory"] == "512Gi"
    assert "nvidia.com/gpu" not in node_manifests([SimulatedNode("cpu")])[0]["status"]["allocatable"]


def test_kwoks_configuration_is_one_file_of_options_and_stages() -> None:
    documents = list(yaml.safe_load_all(configuration(40)))
    assert documents[0]["options"]["nodeLeaseDurationSeconds"] == 40
    assert {each["metadata"]["name"] for each in documents[1:]} == {
        "node-initialize",
        "node-fail",
        "pod-ready",
        "pod-finish",
        "pod-terminate",
        "pod-delete",
        "pod-delete-again",
    }


def test_an_image_holds_its_files_under_their_digests() -> None:
    files = {"bin": Entry(), "bin/a": Entry(b"program"), "bin/b": Entry(link="a")}
    with tarfile.open(fileobj=io.BytesIO(docker_archive("local/x:1", files, ["/bin/a"]))) as image:

        def read(name: str) -> bytes:
            part = image.extractfile(name)
            assert part is not None
            return part.read()

        (manifest,) = json.loads(read("manifest.json"))
        assert manifest["RepoTags"] == ["local/x:1"]
        layer = read(manifest["Layers"][0])
        config = json.loads(read(manifest["Config"]))
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as content:
        assert {member.name: member.linkname for member in content} == {"bin": "", "bin/a": "", "bin/b": "a"}


def test_only_what_the_options_call_for_is_needed() -> None:
    assert "kwok" in needed_tools(UpOptions())
    assert "kwok" not in needed_tools(UpOptions(kwok=False))
    assert "kubelet" not in needed_tools(UpOptions())
    assert "kubelet" in needed_tools(UpOptions(real_node=True))
    assert {"controller-health", "worker-metrics", "temporal-ui"} <= set(port_names(UpOptions()))


def test_lines_say_what_changed_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for done in range(100):
        lines.update("etcd", "compiling", done, 100)
    lines.update("etcd", "linking")
    lines.finish("etcd", "built")
    assert capsys.readouterr().err.splitlines() == ["etcd: compiling (0/100)", "etcd: linking", "etcd: built"]


def test_the_terminal_shows_one_line_for_each_tool() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Terminal(console) as bars:
        bars.update("etcd", "compiling", 5, 10)
        bars.update("kwok", "waiting")
        bars.finish("etcd", "built")
        bars.finish("kwok", "built")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert any("etcd" in line and "10/10" in line and "built" in line for line in shown)
    assert any("kwok" in line and "1/1" in line for line in shown)
    assert not any("etcd" in line and "kwok" in line for line in shown)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomic(file, "one")
    write_atomic(file, b"two")
    assert file.read_text() == "two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_lock_is_seen_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(tmp_path / "absent" / "lock")
    with locked(file):
        assert is_locked(file)
    assert not is_locked(file)


def test_a_data_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match=r"cannot be used: Not a directory.*(?s:.)*--data"):
        Layout.of(tmp_path / "file" / "data").create()
