"""The client against the fake API server: what is sent, what comes back, and what each failure becomes."""

from __future__ import annotations

import asyncio
import base64
import datetime
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from yarl import URL

import kube.client
import kube.connection
import kube.wire
from kube.client import KubeClient
from kube.connection import Connection
from kube.errors import (
    AccessDenied,
    AlreadyExists,
    BadConfig,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    TooLarge,
    Unauthorized,
    Unavailable,
    error_from_status,
)
from kube.resources import CLUSTERROLES, CONFIGMAPS, GPUWORKLOADS, NODES, PODS, resource_for
from kube.wire import object_of
from tests.kube.fake_api import FakeApi


@pytest_asyncio.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest_asyncio.fixture
async def client(api: FakeApi) -> AsyncIterator[KubeClient]:
    async with await api.client() as client:
        yield client


def workload(name: str = "w", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "gpu.warp.dev/v1alpha1", "kind": "GPUWorkload", "metadata": {"name": name}, "spec": spec}


# --- paths ---


def test_paths() -> None:
    assert GPUWORKLOADS.path("a", "w", "status") == "/apis/gpu.warp.dev/v1alpha1/namespaces/a/gpuworkloads/w/status"
    assert PODS.path(None) == "/api/v1/pods"
    assert NODES.path(None, "n") == "/api/v1/nodes/n"
    assert CLUSTERROLES.path(None, "system:a/b").endswith("/clusterroles/system%3Aa%2Fb")
    assert resource_for(workload()) is GPUWORKLOADS
    for namespace, name in (("a", ""), ("a", ".."), ("..", "w"), ("", "w"), (None, "w")):
        with pytest.raises(ValueError):
            GPUWORKLOADS.path(namespace, name)
    with pytest.raises(ValueError):
        NODES.path("a", "n")
    with pytest.raises(LookupError, match="Toaster"):
        resource_for({"apiVersion": "v1", "kind": "Toaster"})


# --- verbs ---


async def test_create_get_delete(client: KubeClient) -> None:
    made = await client.create(GPUWORKLOADS, workload(gpus=1), "a")
    assert made["metadata"]["uid"] and made["spec"] == {"gpus": 1}
    assert (await client.get(GPUWORKLOADS, "w", "a")) == made
    await client.delete(GPUWORKLOADS, "w", "a")
    with pytest.raises(NotFound) as caught:
        await client.get(GPUWORKLOADS, "w", "a")
    assert str(caught.value) == (
        'GET gpuworkloads.gpu.warp.dev a/w: not found (404 NotFound): gpuworkloads "w" not found. '
        "It was deleted, or never was in this namespace."
    )


async def test_create_takes_the_namespace_of_the_body_and_insists_on_one(client: KubeClient, api: FakeApi) -> None:
    body = workload()
    with pytest.raises(ValueError, match="namespace"):
        await client.create(GPUWORKLOADS, body)
    body["metadata"]["namespace"] = "b"
    await client.create(GPUWORKLOADS, body, dry_run=True)
    assert not api.objects(GPUWORKLOADS)
    await client.create(GPUWORKLOADS, body)
    with pytest.raises(AlreadyExists):
        await client.create(GPUWORKLOADS, body)


async def test_large_bodies_arrive_whole(client: KubeClient) -> None:
    """Beyond 1 MiB aiohttp warns about bodies in one piece, and a warning is an error here."""
    body = {"metadata": {"name": "large"}, "data": {"a": "b" * 1_500_000}}
    assert (await client.create(CONFIGMAPS, body, "a"))["data"] == body["data"]


@pytest.mark.parametrize("value", [2**64, object()])
async def test_what_json_cannot_hold_is_refused_and_not_sent(client: KubeClient, value: object) -> None:
    with pytest.raises(Invalid, match="cannot be written as JSON"):
        await client.merge_patch(PODS, "a", "a", {"spec": {"n": value}})


async def test_delete_waits_for_finalizers_and_checks_the_uid(client: KubeClient) -> None:
    body = workload()
    body["metadata"]["finalizers"] = ["gpu.warp.dev/teardown"]
    made = await client.create(GPUWORKLOADS, body, "a")
    with pytest.raises(Conflict):
        await client.delete(GPUWORKLOADS, "w", "a", uid="another")
    version = int(made["metadata"]["resourceVersion"])
    with pytest.raises(Conflict):
        await client.delete(GPUWORKLOADS, "w", "a", resource_version=version - 1)
    await client.delete(GPUWORKLOADS, "w", "a", uid=made["metadata"]["uid"], resource_version=version)
    assert "deletionTimestamp" in (await client.get(GPUWORKLOADS, "w", "a"))["metadata"]
    await client.merge_patch(GPUWORKLOADS, "w", "a", {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        await client.delete(GPUWORKLOADS, "w", "a")


async def test_merge_patch_has_preconditions_and_a_status_of_its_own(client: KubeClient) -> None:
    made = await client.create(GPUWORKLOADS, workload(gpus=1), "a")
    patch = {"metadata": {"uid": made["metadata"]["uid"]}, "spec": {"gpus": 9}, "status": {"phase": "Queued"}}
    patched = await client.merge_patch(GPUWORKLOADS, "w", "a", patch, subresource="status")
    assert patched["status"] == {"phase": "Queued"} and patched["spec"] == {"gpus": 1}
    for stale in ({"resourceVersion": made["metadata"]["resourceVersion"]}, {"uid": "another"}):
        with pytest.raises(Conflict, match="read it again"):
            await client.merge_patch(GPUWORKLOADS, "w", "a", {"metadata": stale, "spec": {"gpus": 2}})


@pytest.mark.parametrize(("apply", "subresource"), [(True, None), (False, None), (False, "status")])
async def test_a_uid_is_a_precondition_everywhere(
    client: KubeClient, api: FakeApi, apply: bool, subresource: str | None
) -> None:
    """Also where the API server ignores it: the status of custom resources."""

    async def write(uid: str, **metadata: str) -> dict[str, Any]:
        body = {"metadata": {"uid": uid, **metadata}, "status": {"phase": uid}, "spec": {"gpus": 1}}
        if apply:
            return await client.apply(GPUWORKLOADS, "w", "a", body, field_manager="berth")
        return await client.merge_patch(GPUWORKLOADS, "w", "a", body, subresource=subresource)

    made = await client.create(GPUWORKLOADS, workload(gpus=1), "a")
    uid = made["metadata"]["uid"]
    with pytest.raises(Conflict, match="replaced"):
        await write("another")
    assert (await client.get(GPUWORKLOADS, "w", "a")) == made
    await write(uid)
    if subresource:
        api.fail(status=409, reason="Conflict", method="PATCH", count=3)  # others write at the same time
        assert (await write(uid))["status"] == {"phase": uid}
        api.fail(status=409, reason="Conflict", method="PATCH", count=10**6)
        with pytest.raises(Conflict):
            await write(uid)
        api.faults.clear()
    requests = len(api.requests)
    version = (await client.get(GPUWORKLOADS, "w", "a"))["metadata"]["resourceVersion"]
    await write(uid, resourceVersion=version)
    assert len(api.requests) == requests + 2
    with pytest.raises(Conflict):
        await write(uid, resourceVersion="1")


async def test_apply_owns_its_fields(client: KubeClient) -> None:
    first = await client.apply(CONFIGMAPS, "c", "a", {"data": {"x": "1", "y": "1"}}, field_manager="one")
    assert first["kind"] == "ConfigMap"
    await client.apply(CONFIGMAPS, "c", "a", {"data": {"x": "2", "z": "2"}}, field_manager="two")
    last = await client.apply(CONFIGMAPS, "c", "a", {"data": {"x": "1"}}, field_manager="one")
    assert last["data"] == {"x": "1", "z": "2"}


async def test_apply_of_a_status_makes_no_object_and_changes_nothing_else(client: KubeClient, api: FakeApi) -> None:
    status = {"status": {"phase": "Running"}}
    with pytest.raises(NotFound):
        await client.apply(GPUWORKLOADS, "w", "a", status, field_manager="one", subresource="status")
    api.put(GPUWORKLOADS, "w", "a", spec={"modelName": "m"})
    body = {**status, "spec": {"modelName": "other"}}
    after = await client.apply(GPUWORKLOADS, "w", "a", body, field_manager="one", subresource="status")
    assert (after["status"], after["spec"]) == ({"phase": "Running"}, {"modelName": "m"})


# --- lists ---


async def test_list_pages_and_selects(client: KubeClient, api: FakeApi) -> None:
    for i in range(7):
        api.put(PODS, f"p{i}", "a" if i % 2 else "b", metadata={"labels": {"odd": str(i % 2)}}, spec={"nodeName": "n"})
    items, version = await client.list(PODS, page_size=3)
    assert len(items) == 7 and version == api.version
    assert items[0]["kind"] == "Pod"
    assert len([r for r in api.requests if r[0] == "GET"]) == 3
    assert len((await client.list(PODS, "a"))[0]) == 3
    assert len((await client.list(PODS, label_selector="odd=1", field_selector="spec.nodeName=n"))[0]) == 3
    only, _ = await client.list(PODS, metadata_only=True)
    assert all(set(item) == {"apiVersion", "kind", "metadata"} for item in only)


async def test_list_begins_anew_when_a_page_expired(client: KubeClient, api: FakeApi) -> None:
    for i in range(5):
        api.put(PODS, f"p{i}", "a")
    api.fail(status=410, reason="Expired", contains="continue=", count=1)
    assert len((await client.list(PODS, page_size=2))[0]) == 5
    api.fail(status=410, reason="Expired", contains="continue=", count=9)
    with pytest.raises(Gone):
        await client.list(PODS, page_size=2)
    assert all("limit=2" in path for _, path, _ in api.requests), "in one piece it may be of any size"


async def test_large_objects_come_in_small_pages(
    client: KubeClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.client._PAGE_BYTES", 100_000)
    parsed: list[int] = []

    def note(data: bytes, request: str) -> dict[str, Any]:
        parsed.append(len(data))
        return object_of(data, request)

    monkeypatch.setattr("kube.client.object_of", note)

    def limits() -> list[int]:
        asked = [int(URL(path).query["limit"]) for _, path, _ in api.requests]
        api.requests.clear()
        return asked

    names = [f"a{i:03}" for i in range(300)]
    for name in names:
        api.put(GPUWORKLOADS, name, "a", spec={"modelName": "ordinary"})
    assert len((await client.list(GPUWORKLOADS, page_size=100))[0]) == 300
    assert limits() == [100, 100, 100], "ordinary ones need no more requests than there are pages"

    for i in range(20):
        api.put(GPUWORKLOADS, f"b{i:03}", "a", spec={"template": "x" * 30_000})
    for i in range(300):
        api.put(GPUWORKLOADS, f"c{i:03}", "a", spec={"modelName": "ordinary"})
    parsed.clear()
    names += [f"b{i:03}" for i in range(20)] + [f"c{i:03}" for i in range(300)]
    items, _ = await client.list(GPUWORKLOADS, page_size=100)
    assert [item["metadata"]["name"] for item in items] == names
    assert max(parsed) <= 100_000
    asked = limits()
    assert asked[:5] == [100, 100, 100, 100, 10], "it may come anywhere, so an answer that is too large is left unread"
    assert min(asked) == 1 and asked[-1] == 100
    assert len(asked) < 40


async def test_one_object_is_taken_whatever_its_size(
    client: KubeClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.client._PAGE_BYTES", 1_000)
    for i in range(3):
        api.put(GPUWORKLOADS, f"w{i}", "a", spec={"template": "x" * 30_000})
    assert len((await client.list(GPUWORKLOADS))[0]) == 3


# --- failures ---


async def test_the_authorizers_refusal_is_told_from_those_of_admission() -> None:
    denied = 'pods is forbidden: User "system:serviceaccount:a:b" cannot list resource "pods" in API group ""'
    quota = 'pods "p" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
    for message, kind in ((denied, AccessDenied), (quota, Forbidden)):
        error = error_from_status({"code": 403, "reason": "Forbidden", "message": message}, request="LIST pods")
        assert type(error) is kind


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (413, "RequestEntityTooLarge", TooLarge),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Unavailable),
    ],
)
async def test_every_status_has_its_class(
    client: KubeClient, api: FakeApi, status: int, reason: str, kind: type[KubeError]
) -> None:
    api.fail(status=status, reason=reason, headers={"Retry-After": "7"})
    with pytest.raises(KubeError) as caught:
        await client.get(PODS, "p", "a")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason, caught.value.retry_after) == (status, reason, 7.0)


async def test_an_unknown_kind_says_so(client: KubeClient, api: FakeApi) -> None:
    api.fail(status=404, reason="NotFound")
    with pytest.raises(NotFound, match="CustomResourceDefinition installed"):
        await client.list(GPUWORKLOADS)


@pytest.mark.parametrize("do", ["reset", "garbage", "hang"])
async def test_broken_answers_are_unavailable(api: FakeApi, do: str) -> None:
    async with await api.client(timeout=0.3) as client:
        api.fail(do, count=2)  # a reset GET on a used connection is tried twice by aiohttp
        with pytest.raises(Unavailable, match="PATCH pods a/p"):
            await client.merge_patch(PODS, "p", "a", {})


async def test_nobody_listens() -> None:
    async with FakeApi() as api:
        client = await api.client()
    async with client:
        with pytest.raises(Unavailable, match="127") as caught:
            await client.get(PODS, "p", "a")
    assert caught.value.status == 0


# --- watches ---


async def test_watch_sees_what_its_selection_sees(client: KubeClient, api: FakeApi) -> None:
    since = api.version
    api.put(PODS, "p", "a", metadata={"labels": {"x": "1"}})
    api.put(PODS, "other", "a")
    api.put(PODS, "p", "a", metadata={"labels": {"x": "1"}}, spec={"nodeName": "n"})
    api.put(PODS, "p", "a", metadata={"labels": {}})
    seen = []
    async with aclosing(client.watch(PODS, resource_version=since, label_selector="x", timeout_seconds=5)) as events:
        async for kind, obj in events:
            seen.append(kind)
            if kind == "DELETED":
                api.bookmark(PODS)
            if kind == "BOOKMARK":
                assert obj["metadata"]["resourceVersion"] == str(api.version)
                break
    assert seen == ["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


async def test_watch_ends_when_the_server_ends_it(client: KubeClient, api: FakeApi) -> None:
    began = time.monotonic()
    assert [e async for e in client.watch(PODS, resource_version=api.version, timeout_seconds=1)] == []
    assert 0.8 < time.monotonic() - began < 5


@pytest.mark.parametrize("as_event", [True, False])
async def test_watch_from_a_forgotten_version_is_gone(as_event: bool) -> None:
    async with FakeApi(gone_as_event=as_event) as api, await api.client() as client:
        since = api.version
        api.put(PODS, "p", "a")
        api.compact()
        with pytest.raises(Gone):
            async for _ in client.watch(PODS, resource_version=since):
                pass


async def _spoil(events: Any, api: FakeApi, *spoils: bytes | None) -> None:
    """Waits for the first event, spoils the stream, reads on."""
    async with aclosing(events):
        async for _ in events:
            for spoil in spoils:
                if spoil is None:
                    api.drop_watches()
                else:
                    api.send_raw(spoil)


@pytest.mark.parametrize(
    ("spoil", "kind", "reason"),
    [
        (b"<html>\n", Unavailable, "BadResponse"),
        (b'{"type": 1}\n', Unavailable, "BadResponse"),
        (b"[]\n", Unavailable, "BadResponse"),
        (None, Unavailable, "ConnectionFailed"),
        (b"x" * 5000, TooLarge, "EventTooLarge"),
        (
            b'{"type": "ERROR", "object": {"code": 403, "reason": "Forbidden"}}\n',
            Forbidden,
            "Forbidden",
        ),
    ],
)
async def test_spoilt_streams(
    client: KubeClient,
    api: FakeApi,
    monkeypatch: pytest.MonkeyPatch,
    spoil: bytes | None,
    kind: type[KubeError],
    reason: str,
) -> None:
    monkeypatch.setattr(kube.wire, "MAX_LINE", 4096)
    since = api.version
    api.put(PODS, "p", "a")
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(_spoil(client.watch(PODS, resource_version=since), api, spoil), 5)
    assert caught.value.reason == reason


async def test_a_cut_line_is_a_lost_connection(client: KubeClient, api: FakeApi) -> None:
    since = api.version
    api.put(PODS, "p", "a")
    with pytest.raises(Unavailable, match="within an event"):
        await _spoil(client.watch(PODS, resource_version=since), api, b'{"type": "ADD', b"")


async def test_a_silent_watch_is_given_up(client: KubeClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube.client, "_QUIET", 0.2)
    with pytest.raises(Unavailable) as caught:
        async for _ in client.watch(PODS, resource_version=api.version):
            pass
    assert caught.value.reason == "Timeout"


# --- who we are ---


def _some_ca() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


async def test_refused_credentials_are_loaded_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube.connection, "_RELOAD_EVERY", 0.0)
    async with FakeApi(token="old") as api:
        path = api.kubeconfig(tmp_path)
        async with await KubeClient.connect(path) as client:
            api.put(PODS, "p", "a")
            await client.get(PODS, "p", "a")
            api.token = "new"
            with pytest.raises(Unauthorized, match="kubeconfig"):
                await client.get(PODS, "p", "a")
            api.kubeconfig(tmp_path)
            loads = []

            async def load(*args: Any, **options: Any) -> None:
                loads.append(args)
                await load_kube_config(*args, **options)  # type: ignore[no-untyped-call]

            monkeypatch.setattr(kube.connection, "load_kube_config", load)
            await asyncio.gather(*(client.get(PODS, "p", "a") for _ in range(5)))
            assert len(loads) == 1


async def test_in_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.aio.config import incluster_config

    ca = tmp_path / "ca.crt"
    ca.write_text(_some_ca())
    (tmp_path / "token").write_text("secret")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, value in (("SERVICE_TOKEN_FILENAME", "token"), ("SERVICE_CERT_FILENAME", "ca.crt")):
        monkeypatch.setattr(incluster_config, name, str(tmp_path / value))
    async with await KubeClient.connect() as client:
        assert client.host == "https://[fd00::1]:443"
        assert await client._connection.authorization() == "bearer secret"
    (tmp_path / "token").unlink()
    with pytest.raises(BadConfig, match="token file"):
        await KubeClient.connect()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "[1]",
        "{",
        "current-context: x",
        yaml.safe_dump({"current-context": "x", "contexts": [{"name": "x"}]}),
    ],
)
async def test_malformed_kubeconfigs_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(BadConfig, match="kubeconfig"):
        await KubeClient.connect(path)


async def test_unusable_tls_files_and_missing_ones(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="does not exist"):
        await KubeClient.connect(tmp_path / "absent")
    async with FakeApi() as api:
        config = yaml.safe_load(api.kubeconfig(tmp_path).read_text())
    config["clusters"][0]["cluster"] = {
        "server": "https://127.0.0.1:1",
        "certificate-authority-data": base64.b64encode(b"not a certificate").decode(),
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(BadConfig, match="TLS"):
        await KubeClient.connect(path)


@pytest.mark.parametrize(
    ("host", "proxied"),
    [
        ("https://cluster.example:6443", True),
        ("https://128.0.0.1:6443", True),
        ("https://[2001:db8::1]:6443", True),
        ("https://127.0.0.1:6443", False),
        ("https://127.9.9.9:6443", False),
        ("https://localhost:6443", False),
        ("https://[::1]:6443", False),
    ],
)
async def test_no_proxy_leads_to_this_machine(host: str, proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    connection = Connection(Configuration(host=host))
    try:
        assert connection.options.get("proxy") == ("http://proxy.example:3128" if proxied else None)
    finally:
        await connection.close()
