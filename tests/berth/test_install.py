"""What installing says of a cluster that lacks a kind which berth can do without."""

from __future__ import annotations

import logging

import pytest

from berth.install import install, manifests
from kube.errors import KubeError
from kube.resources import CRDS, DEVICECLASSES, GPUMODELPROFILES, GPUWORKLOADS
from tests.kube.fake_api import FakeApi


async def installed(api: FakeApi) -> None:
    async with await api.client() as kube:
        for kind in (GPUWORKLOADS, GPUMODELPROFILES):
            await kube.create(CRDS, {"metadata": {"name": kind.qualified}})
        await install(kube)


async def test_device_classes_are_installed_where_the_cluster_knows_the_kind() -> None:
    async with FakeApi() as api:
        await installed(api)
        assert {name for _, name in api.objects(DEVICECLASSES)} == {
            each["metadata"]["name"] for each in manifests("dra")
        }


async def test_a_cluster_without_dra_gets_all_else_and_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApi() as api:
        api.fail(status=404, reason="NotFound", contains="deviceclasses", count=1000)
        with caplog.at_level(logging.WARNING):
            await installed(api)
        assert not api.objects(DEVICECLASSES)
    (record,) = [each for each in caplog.records if each.name == "berth.install"]
    told = record.getMessage()
    assert "does not serve resource.k8s.io/v1" in told and "device plugin only" in told and "\n" not in told


async def test_what_is_refused_for_another_reason_is_not_passed_over() -> None:
    async with FakeApi() as api:
        api.fail(status=422, reason="Invalid", contains="deviceclasses", count=1000)
        with pytest.raises(KubeError, match="deviceclasses"):
            await installed(api)
