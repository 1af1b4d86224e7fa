"""Certificates say who they speak for, are for their owner's eyes, and are renewed in time."""

from __future__ import annotations

import base64
import datetime
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stack import pki
from stack.control_plane import make_credentials
from stack.paths import Layout
from stack.pki import IDENTITIES, Authority, Identity, service_account, write_kubeconfig


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_client_certificate_names_user_and_groups(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    certificate = load(authority.client("w", service_account("berth-worker")).cert)
    certificate.verify_directly_issued_by(load(authority.pair.cert))
    names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    groups = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    assert names == ["system:serviceaccount:berth-system:berth-worker"]
    assert groups == ["system:serviceaccounts", "system:serviceaccounts:berth-system"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_only_the_admin_is_above_rbac() -> None:
    assert [name for name, identity in IDENTITIES.items() if "system:masters" in identity.groups] == ["admin"]


def test_a_server_certificate_names_its_hosts(tmp_path: Path) -> None:
    certificate = load(Authority(tmp_path, "test").server("api", ("127.0.0.1", "kubernetes.default.svc")).cert)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["kubernetes.default.svc"]


def test_what_is_good_is_kept_and_what_differs_is_made_anew(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    first = authority.server("api", ("127.0.0.1",)).cert.read_bytes()
    assert Authority(tmp_path, "test").server("api", ("127.0.0.1",)).cert.read_bytes() == first
    second = authority.server("api", ("127.0.0.1", "10.96.0.1")).cert.read_bytes()
    assert second != first
    client = authority.client("c", Identity("a")).cert.read_bytes()
    assert authority.client("c", Identity("a", ("g",))).cert.read_bytes() != client


def test_what_will_soon_end_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "test")
    monkeypatch.setattr(pki, "_LEAF_LIFE", datetime.timedelta(days=20))
    old = authority.client("c", Identity("a")).cert.read_bytes()
    monkeypatch.undo()
    renewed = authority.client("c", Identity("a"))
    assert renewed.cert.read_bytes() != old
    left = load(renewed.cert).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left > datetime.timedelta(days=300)


def test_a_broken_file_is_mended(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    pair = authority.client("c", Identity("a"))
    pair.cert.write_text("not a certificate")
    load(authority.client("c", Identity("a")).cert)


def test_keys_are_for_their_owner_and_etcd_has_its_own_authority(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path / "data")
    layout.create()
    credentials = make_credentials(layout)
    assert stat.S_IMODE(layout.root.stat().st_mode) == 0o700
    keys = list(layout.pki.rglob("*.key"))
    assert len(keys) > 8
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    load(credentials.etcd_client.cert).verify_directly_issued_by(load(credentials.etcd_authority.cert))
    with pytest.raises(ValueError, match="match"):
        load(credentials.admin.cert).verify_directly_issued_by(load(credentials.etcd_authority.cert))


def test_a_kubeconfig_needs_no_other_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    pair = authority.client("c", Identity("a"))
    file = tmp_path / "kubeconfig"
    write_kubeconfig(file, "https://127.0.0.1:6443", authority.pair, pair, "me")
    content = yaml.safe_load(file.read_text())
    assert content["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:6443"
    assert base64.b64decode(content["users"][0]["user"]["client-key-data"]) == pair.key.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
