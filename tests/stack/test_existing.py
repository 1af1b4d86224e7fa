"""`berth up` against a cluster or a Temporal that exists already."""

from __future__ import annotations

import hashlib
import json
import ssl
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stack import Endpoints, ExistingCluster, ExistingTemporal, Probe, Stack, StackError, UpOptions
from stack.external import check_temporal, take_context
from tests.stack.outside import Outside


def write(path: Path, **content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(
        tmp_path / "kube" / "config",
        clusters=[
            {"name": "one", "cluster": {"server": "https://one:6443", "certificate-authority": "ca.pem"}},
            {"name": "two", "cluster": {"server": "https://two:6443"}},
        ],
        users=[{"name": "me", "user": {"token": "secret"}}, {"name": "you", "user": {"token": "other"}}],
        contexts=[
            {"name": "first", "context": {"cluster": "one", "user": "me"}},
            {"name": "second", "context": {"cluster": "two", "user": "you"}},
        ],
        **{"current-context": "first"},
    )


def test_one_context_is_taken_and_no_other_persons_secret(config: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert take_context(ExistingCluster(config), target) == "https://one:6443"
    text = target.read_text()
    assert "secret" in text
    assert "other" not in text
    assert str(config.parent / "ca.pem") in text, "a relative file name no longer leads anywhere"
    assert target.stat().st_mode & 0o077 == 0
    assert take_context(ExistingCluster(config, "second"), target) == "https://two:6443"


def test_kubectls_own_rules_are_followed(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(
        tmp_path / "other",
        clusters=[{"name": "three", "cluster": {"server": "https://three"}}],
        contexts=[{"name": "third", "context": {"cluster": "three", "user": "me"}}],
    )
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'absent'}:{config}:{other}")
    assert take_context(ExistingCluster(), tmp_path / "out") == "https://one:6443"
    assert take_context(ExistingCluster(context="third"), tmp_path / "out") == "https://three"


def test_a_wrong_context_is_answered_with_the_right_ones(config: Path, tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"(?s)no context 'thrid'.*first, second"):
        take_context(ExistingCluster(config, "thrid"), tmp_path / "out")
    with pytest.raises(StackError, match="cannot be read: No such file"):
        take_context(ExistingCluster(tmp_path / "absent"), tmp_path / "out")
    (tmp_path / "broken").write_text("{")
    with pytest.raises(StackError, match="not YAML"):
        take_context(ExistingCluster(tmp_path / "broken"), tmp_path / "out")


@pytest.mark.parametrize(
    ("temporal", "complaint"),
    [
        (ExistingTemporal("nowhere"), "not host:port"),
        (ExistingTemporal("127.0.0.1:1"), r"(?s)127.0.0.1:1 does not answer: Connection refused.*Check the address"),
        (ExistingTemporal("127.0.0.1:1", api_key_env="NO_SUCH_KEY"), r"NO_SUCH_KEY is not set"),
        (ExistingTemporal("127.0.0.1:1", tls_ca=Path("/no/ca.pem")), r"/no/ca.pem does not exist"),
    ],
)
def test_a_wrong_temporal_is_said_so(temporal: ExistingTemporal, complaint: str) -> None:
    with pytest.raises(StackError, match=complaint):
        check_temporal(temporal)


def test_a_temporal_that_speaks_no_tls_is_said_so(outside: Outside) -> None:
    port = outside.port
    with pytest.raises(StackError, match=r"refuses TLS.*(?s:.)*--temporal-tls-ca"):
        check_temporal(ExistingTemporal(f"127.0.0.1:{port}", tls=True))


def test_tls_is_implied_by_what_only_makes_sense_with_it() -> None:
    assert not ExistingTemporal("a:1").uses_tls
    assert ExistingTemporal("a:1", api_key_env="K").uses_tls
    assert ExistingTemporal("a:1", tls_ca=Path("ca")).uses_tls
    assert ssl.HAS_ALPN


def test_nothing_is_started_beside_existing_services(light: Stack, outside: Outside) -> None:
    endpoints = light.endpoints
    assert light.status() == []
    assert not endpoints.embedded_cluster
    assert not endpoints.embedded_temporal
    assert endpoints.temporal_namespace == "prod"
    assert endpoints.temporal_ui is None
    assert endpoints.kubeconfig("berth-worker") == endpoints.kubeconfig("admin")
    assert endpoints.temporal_environment() == {
        "TEMPORAL_CONFIG_FILE": "/dev/null",
        "TEMPORAL_ADDRESS": endpoints.temporal_address,
        "TEMPORAL_NAMESPACE": "prod",
    }
    assert Endpoints.from_json(endpoints.to_json()) == endpoints


def test_the_api_key_reaches_processes_and_no_file(
    tmp_path: Path, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    monkeypatch.setattr("stack.plan.check_temporal", lambda temporal: None)  # the listener here speaks no TLS
    stack = Stack(tmp_path / "data")
    stack.up(outside.with_key("MY_KEY"))
    there = stack.layout.root / "there"
    try:
        stack.add_process("key", ("sh", "-c", 'echo "$TEMPORAL_API_KEY" | sha256sum > there; sleep 1000'))
        digest = hashlib.sha256(b"very-secret\n").hexdigest()
        deadline = time.monotonic() + 10
        while not there.exists() or digest not in there.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        stack.down()
    for file in (tmp_path / "data").rglob("*"):
        assert not file.is_file() or b"very-secret" not in file.read_bytes(), file


def test_a_running_stack_does_not_go_on_with_an_old_api_key(
    tmp_path: Path, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stack.plan.check_temporal", lambda temporal: None)  # the listener here speaks no TLS
    plain, keyed = outside.options, outside.with_key("MY_KEY")
    stack = Stack(tmp_path / "data")

    def refused(options: UpOptions) -> None:
        before = stack.endpoints
        with pytest.raises(StackError, match=r"(?s)another Temporal API key.*berth down"):
            stack.up(options)
        assert stack.endpoints == before
        assert stack.running

    try:
        stack.up(plain)
        monkeypatch.setenv("MY_KEY", "first")
        refused(keyed)
        stack.down()
        stack.up(keyed)
        stack.up(keyed)
        monkeypatch.setenv("MY_KEY", "second")
        refused(keyed)
        refused(plain)
    finally:
        stack.down()


TOLD = """
import json, pathlib, time
from temporalio.envconfig import ClientConfig
config = ClientConfig.load_client_connect_config()
config["tls"] = repr(config.get("tls"))
pathlib.Path("told.new").write_text(json.dumps(config))
pathlib.Path("told.new").rename("told")
time.sleep(1000)
"""


def connects_to(stack: Stack) -> dict[str, str]:
    """Where a process of the stack connects, and how."""
    told = stack.layout.root / "told"
    argv = (sys.executable, "-c", TOLD)
    stack.add_process("asked", argv, stack.endpoints.temporal_environment(), [Probe("file", str(told))])
    answer: dict[str, str] = json.loads(told.read_text())
    return answer


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person with a profile file and variables for a Temporal of theirs."""
    file = tmp_path / "temporalio" / "temporal.toml"
    file.parent.mkdir()
    text = 'address = "theirs:7233"\nnamespace = "theirs"\napi_key = "file-secret"\ngrpc_meta = {a = "b"}\n'
    file.write_text("".join(f"[profile.{name}]\n{text}" for name in ("default", "work")))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("TEMPORAL_CONFIG_FILE")
    for name in ("API_KEY", "GRPC_META_ROUTE", "TLS_SERVER_NAME"):
        monkeypatch.setenv(f"TEMPORAL_{name}", "theirs")
    monkeypatch.setenv("TEMPORAL_PROFILE", "work")


def test_a_persons_own_temporal_is_not_the_stacks(tmp_path: Path, outside: Outside, profile: None) -> None:
    stack = Stack(tmp_path / "data")
    options = outside.options
    endpoints = stack.up(options)
    try:
        assert connects_to(stack) == {
            "target_host": endpoints.temporal_address, "namespace": "prod", "tls": "None"
        }  # fmt: skip
    finally:
        stack.down()


def test_what_the_options_say_of_a_temporal_holds(
    tmp_path: Path, outside: Outside, profile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stack.plan.check_temporal", lambda temporal: None)  # the listener here speaks no TLS
    monkeypatch.setenv("MY_KEY", "very-secret")
    monkeypatch.chdir(tmp_path)
    Path("ca.pem").write_text("mine")
    options = outside.options
    temporal = ExistingTemporal("mine:7233", "prod", tls_ca=Path("ca.pem"), api_key_env="MY_KEY")
    stack = Stack(tmp_path / "data")
    stack.up(replace(options, temporal=temporal))
    try:
        told = connects_to(stack)
    finally:
        stack.down()
    tls = told.pop("tls")
    assert "server_root_ca_cert=b'mine'" in tls
    assert "domain=None" in tls
    assert told == {"target_host": "mine:7233", "namespace": "prod", "api_key": "very-secret"}


def test_a_stack_that_never_was_is_said_so(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "none")
    with pytest.raises(StackError, match=r"(?s)no stack in .*berth up"):
        _ = stack.endpoints
    assert not stack.down()
    assert stack.status() == []
