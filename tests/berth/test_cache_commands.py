"""`berth cache build` and `inspect`, as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from berth.cli import command_line
from tests.images import caches
from tests.images.archives import layer, member
from tests.images.test_inspection import handmade, summary


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command_line(), ["cache", *map(str, arguments)])


def test_a_cache_becomes_an_image_and_is_looked_into(tmp_path: Path) -> None:
    caches.kernel(tmp_path / "cache")
    built = called("build", tmp_path / "cache", "--out", tmp_path / "out", "--tag", "v1")
    assert built.exit_code == 0 and "sha256:" in built.output, built.output
    assert "cuda sm_90 with warps of 32; 1 entries" in built.output and caches.AT in built.output
    looked = called("inspect", tmp_path / "out")
    assert looked.exit_code == 0 and "V12.9.86" in looked.output and "3.9.0" in looked.output
    digest = json.loads(called("build", tmp_path / "cache", "--out", tmp_path / "again", "--json").output)["digest"]
    assert digest in built.output
    (told,) = json.loads(called("inspect", tmp_path / "out", "--json").output)
    assert told["digest"] == digest and told["extracted"]["kernels"] == 1 and told["warnings"] == []


def test_an_index_for_several_gpus(tmp_path: Path) -> None:
    caches.kernel(tmp_path / "cache", "a")
    caches.kernel(tmp_path / "cache", "b", target=caches.HIP)
    built = called("build", tmp_path / "cache", "--out", tmp_path / "out", "--index")
    assert built.exit_code == 0 and "index" in built.output
    assert "hip gfx942 with warps of 64" in called("inspect", tmp_path / "out").output


def test_what_the_cache_does_not_tell_may_be_said(tmp_path: Path) -> None:
    (caches.vllm_aot(tmp_path / "vllm") / "rank_0_0" / "model").write_bytes(b"?")
    arguments = ("build", tmp_path / "vllm", "--out", tmp_path / "out")
    assert "--target" in called(*arguments).output
    told = called(*arguments, "--target", "hip:gfx942:64", "--triton-version", "3.9.0", "--env", "A=1", "--env", "B=")
    assert told.exit_code == 0, told.output
    (found,) = json.loads(called("inspect", tmp_path / "out", "--json").output)
    assert found["targets"] == [{"backend": "hip", "arch": "gfx942", "warp_size": 64}]
    assert found["environment"] == {"A": "1", "B": ""}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "h100"), "is no GPU such as"),
        (("--target", "cuda:90:many"), "is no GPU such as"),
        (("--env", "A"), "is not NAME=VALUE"),
        (("--kind", "torch"), "is none of triton, vllm"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, arguments: tuple[str, str], words: str) -> None:
    found = called("build", tmp_path, "--out", tmp_path / "out", *arguments)
    assert found.exit_code == 2 and words in found.output


def test_refusals_are_messages(tmp_path: Path) -> None:
    for found in (called("build", tmp_path / "no", "--out", tmp_path / "out"), called("inspect", tmp_path / "no")):
        assert found.exit_code == 1 and "error:" in found.output and "Traceback" not in found.output


def test_an_image_that_a_node_would_refuse(tmp_path: Path) -> None:
    handmade(tmp_path / "image", layer(member(b"../[red]evil", b"x")), summary(backend="cuda", arch="90", warp_size=32))
    found = called("inspect", tmp_path / "image")
    assert found.exit_code == 1 and "a node refuses it: '../[red]evil'" in found.output
