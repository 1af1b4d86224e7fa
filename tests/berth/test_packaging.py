"""What the wheel holds is where an installed berth looks for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from berth import install
from berth.cli.application import application_processes
from berth.demo import trace
from berth.version import code_id
from stack import Endpoints, UpOptions

ROOT = Path(__file__).resolve().parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the wheel takes from outside its packages, where it puts them, and nothing else."""
    for source, target in WHEEL["force-include"].items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target).symlink_to(ROOT / source)
    monkeypatch.setattr(install, "_HERE", tmp_path / "berth")
    monkeypatch.setattr(trace, "_HERE", tmp_path / "berth" / "demo")
    return tmp_path


def test_an_installed_berth_finds_its_manifests_and_its_trace(installed: Path) -> None:
    found = [manifest["spec"]["names"]["plural"] for manifest in install.manifests("crds")]
    assert found == [
        "gpumodelprofiles", "gpuquotas", "gpureservations", "gpuseatgroups", "gpuseatprofiles", "gpuworkloads",
        "kernelcachepolicies", "nodedevices", "seatmigrations", "tritonkernelcacheclusters",
        "tritonkernelcachenodestatusclusters", "tritonkernelcachenodestatuses", "tritonkernelcaches",
    ]  # fmt: skip
    assert install.manifests("rbac") and install.manifests("policies") and install.manifests("csi")
    assert install.manifests("dra")
    assert trace.default_folder().is_relative_to(installed)


def test_the_wheel_has_every_package() -> None:
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert set(WHEEL["packages"]) == packages - {"benchmarks", "tests"}


def test_new_code_makes_other_processes_of_it(tmp_path: Path) -> None:
    ports = {f"{name}-{port}": 1 for name in ("controller", "worker") for port in ("health", "metrics", "webhook")}
    endpoints = Endpoints(
        tmp_path, "127.0.0.1:1", "default", None, False, None, None, None, None, None,
        kubeconfigs={"admin": tmp_path}, embedded_cluster=False, embedded_temporal=False, ports=ports,
    )  # fmt: skip
    assert {spec.env["BERTH_CODE"] for spec in application_processes(endpoints, UpOptions())} == {code_id()}
