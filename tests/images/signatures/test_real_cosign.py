"""Against the real cosign, in registries with the referrers API and without; keyless ones by a virtual Sigstore."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from typer.testing import CliRunner

from berth.cli import command_line
from crds.kernelcachepolicy import Signer
from images.descriptor import OCI_MANIFEST, Descriptor
from images.reference import Reference
from images.registry import Registry
from images.signatures import signing
from images.signatures.discovery import sig_tag
from images.signatures.envelopes import SIMPLE_TYPE
from images.signatures.repository import ImageRepository
from images.signatures.verify import verify
from planning.caches.trust import Findings
from stack import Lines, StackError
from stack.tools import Toolbox
from tests.images.conftest import RealRegistry
from tests.images.signatures.rig import (
    Authority,
    digest_of,
    keyless,
    new_key,
    pinned,
    policy,
    public_pem,
    roots,
    simple,
)

pytestmark = pytest.mark.stack

ALICE = keyless()
LAYER = b"a layer that nobody unpacks here"
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(b"{}"), "size": 2},
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest_of(LAYER), "size": len(LAYER)},
        ],
    }
).encode()
DIGEST = digest_of(MANIFEST)


def program(name: str, pytestconfig: pytest.Config) -> Path:
    try:
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            return Toolbox().ensure([name], Lines())[name].path
    except StackError as error:
        pytest.skip(f"{name} cannot be had here: {error}")


@dataclass(frozen=True)
class Cosign:
    """The real one, in a folder of its own."""

    path: Path
    folder: Path

    def run(self, *arguments: str, good: bool = True) -> str:
        done = subprocess.run(
            [str(self.path), *arguments],
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.environ["PATH"], "COSIGN_PASSWORD": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not good or done.returncode == 0, done.stderr
        return done.stdout if done.returncode == 0 else ""

    def sign(self, image: Reference, key: str, *more: str) -> None:
        self.run("sign", "--yes", "--key", key, "--tlog-upload=false", "--use-signing-config=false", *more, str(image))


@pytest.fixture(scope="session")
def cosign_program(pytestconfig: pytest.Config) -> Path:
    return program("cosign", pytestconfig)


@pytest.fixture
def cosign(cosign_program: Path, tmp_path: Path) -> Cosign:
    return Cosign(cosign_program, tmp_path)


@pytest.fixture(scope="session")
def made(pytestconfig: pytest.Config) -> Mapping[str, Any]:
    """What a virtual Sigstore that lives for this session signs."""
    path = program("virtual-sigstore", pytestconfig)
    done = subprocess.run([str(path), DIGEST], capture_output=True, check=True, timeout=60)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


async def push(registry: Registry, image: Reference, data: bytes, *blobs: bytes) -> None:
    for blob in blobs:
        await registry.push_blob(image, Descriptor("application/octet-stream", digest_of(blob), len(blob)), blob)
    await registry.push_manifest(image, data, OCI_MANIFEST)


async def pushed(real: RealRegistry, name: str) -> Reference:
    image = real.reference(f"{name}:v1")
    async with Registry(real.settings) as registry:
        await push(registry, image, MANIFEST, b"{}", LAYER)
    return Reference(image.registry, image.repository, digest=DIGEST)


async def attach(real: RealRegistry, image: Reference, bundle: Any, digest: str = DIGEST) -> None:
    content = bundle if isinstance(bundle, bytes) else json.dumps(bundle).encode()
    referring = signing.referring(content, OCI_MANIFEST, digest, len(MANIFEST), "2026-11-22T12:00:00Z")
    async with Registry(real.settings) as registry:
        await push(registry, Reference(image.registry, image.repository), referring.manifest, *referring.blobs.values())


async def attach_legacy(real: RealRegistry, image: Reference, layer: Mapping[str, Any]) -> None:
    candidate = simple(layer)
    described = {
        "mediaType": SIMPLE_TYPE,
        "digest": digest_of(candidate.content),
        "size": len(candidate.content),
        "annotations": dict(candidate.annotations),
    }
    manifest = json.loads(MANIFEST) | {"layers": [described]}
    async with Registry(real.settings) as registry:
        await push(registry, image.tagged(sig_tag(DIGEST)), json.dumps(manifest).encode(), b"{}", candidate.content)


async def look(
    real: RealRegistry, image: Reference, *signers: Signer, made: Mapping[str, Any] | None = None, digest: str = DIGEST
) -> Findings:
    async with Registry(real.settings) as registry:
        return await verify(
            ImageRepository(registry, image),
            digest,
            [policy(*signers)],
            roots(made) if made else {},
            time.time(),
            seed=1,
        )


def satisfied(found: Findings) -> bool:
    return any(each.satisfies for each in found.signatures)


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bundle", "legacy"])
async def test_what_cosign_signs_with_a_key(real_registry: RealRegistry, cosign: Cosign, form: str) -> None:
    image = await pushed(real_registry, f"cosign/{form}")
    cosign.run("generate-key-pair", "--output-key-prefix", form)
    assert (await look(real_registry, image, pinned(new_key()))).signatures == ()
    cosign.sign(image, f"{form}.key", *([] if form == "bundle" else ["--new-bundle-format=false"]))
    signer = Signer(name="release", key=(cosign.folder / f"{form}.pub").read_text())
    found = await look(real_registry, image, signer)
    assert [each.satisfies for each in found.signatures] == [{("team", "release")}], found
    assert found.signatures[0].place.startswith("bundle " if form == "bundle" else "signature ")
    another = await look(real_registry, image, pinned(new_key()))
    assert [each.problem for each in another.signatures] == ["is not by this key"]
    await attach(real_registry, image, signing.sign(DIGEST, new_key()))
    beside = await look(real_registry, image, signer)
    assert sorted(bool(each.satisfies) for each in beside.signatures) == [False, True]


@pytest.mark.parametrize("kind", ["p384", "p521", "rsa"])
async def test_other_kinds_of_keys(real_registry: RealRegistry, cosign: Cosign, kind: str) -> None:
    kinds: dict[str, Callable[[], signing.PrivateKey]] = {
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 3072),
    }
    key = kinds[kind]()
    imported(cosign, kind, key)
    for form in ("bundle", "legacy"):
        image = await pushed(real_registry, f"cosign/{kind}/{form}")
        cosign.sign(image, f"{kind}.key", *([] if form == "bundle" else ["--new-bundle-format=false"]))
        assert satisfied(await look(real_registry, image, pinned(key))), form


async def test_ed25519_is_pure(real_registry: RealRegistry, cosign: Cosign) -> None:
    """Cosign signs images by Ed25519ph, which its own verification refuses as well, and takes the pure kind."""
    key = ed25519.Ed25519PrivateKey.generate()
    imported(cosign, "ed25519", key)
    (cosign.folder / "ed25519.pub").write_text(public_pem(key))
    theirs, ours = await pushed(real_registry, "ed25519/cosign"), await pushed(real_registry, "ed25519/berth")
    cosign.sign(theirs, "ed25519.key")
    await attach(real_registry, ours, signing.sign(DIGEST, key))
    for image, good in ((theirs, False), (ours, True)):
        assert satisfied(await look(real_registry, image, pinned(key))) is good
        assert (
            bool(cosign.run("verify", "--key", "ed25519.pub", "--insecure-ignore-tlog", str(image), good=False)) is good
        )


def imported(cosign: Cosign, name: str, key: signing.PrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (cosign.folder / f"{name}.pem").write_bytes(pem)
    cosign.run("import-key-pair", "--key", f"{name}.pem", "--output-key-prefix", name)


async def test_a_certificate_of_ones_own_authority(real_registry: RealRegistry, cosign: Cosign) -> None:
    authority, key = Authority.new(), new_key()
    leaf = authority.issue(key, x509.UniformResourceIdentifier("https://ci.example/kernels"), hours=24 * 3650)
    imported(cosign, "ci", key)
    (cosign.folder / "ci.crt").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (cosign.folder / "ci-chain.crt").write_text(authority.pem)
    signer = Signer.model_validate(
        {"name": "ci", "certificate": {"authorities": authority.pem, "identity": "https://ci.example/kernels"}}
    )
    for form in ("bundle", "legacy"):
        image = await pushed(real_registry, f"cosign/certificate/{form}")
        cosign.sign(
            image, "ci.key", "--certificate", "ci.crt", "--certificate-chain", "ci-chain.crt",
            *([] if form == "bundle" else ["--new-bundle-format=false"]),
        )  # fmt: skip
        found = await look(real_registry, image, signer)
        assert satisfied(found), found


async def test_a_signature_copied_to_another_image_or_repository(real_registry: RealRegistry, cosign: Cosign) -> None:
    key = new_key()
    bundle = signing.sign(DIGEST, key)
    elsewhere = await pushed(real_registry, "copied/elsewhere")
    await attach(real_registry, elsewhere, bundle)
    assert satisfied(await look(real_registry, elsewhere, pinned(key)))
    other = MANIFEST + b" "
    async with Registry(real_registry.settings) as registry:
        await push(registry, real_registry.reference("copied/other:v1"), other, b"{}", LAYER)
    image = real_registry.reference("copied/other:v1").at(digest_of(other))
    await attach(real_registry, image, bundle, digest_of(other))
    found = await look(real_registry, image, pinned(key), digest=digest_of(other))
    assert ["is over another image" in each.problem for each in found.signatures] == [True]


# --- keyless -------------------------------------------------------------------------------------------------------


async def test_keyless_ones_and_cosign_agree(
    real_registry: RealRegistry, cosign: Cosign, made: Mapping[str, Any]
) -> None:
    """Each signature in a repository of its own. Cosign takes attestations for signatures too; else it agrees."""
    (cosign.folder / "root.json").write_text(json.dumps(made["trustedRoot"]))
    for form, each in (("bundle", "bundles"), ("legacy", "legacy")):
        for name, signature in made[each].items():
            if not real_registry.referrers and name not in ("good", "tiles", "look-alike", "stranger"):
                continue  # what is the same in both kinds of registries is asked for in one
            image = await pushed(real_registry, f"keyless/{form}/{name}")
            await (attach if form == "bundle" else attach_legacy)(real_registry, image, signature)
            good = name in ("good", "tiles", "subjects")
            assert satisfied(await look(real_registry, image, ALICE, made=made)) is good, (form, name)
            theirs = cosign.run(
                "verify", "--trusted-root", "root.json", "--certificate-identity", "alice@example.com",
                "--certificate-oidc-issuer", "https://accounts.example.com",
                *([] if form == "bundle" else ["--new-bundle-format=false"]), str(image), good=False,
            )  # fmt: skip
            assert bool(theirs) is (good or name == "attestation"), (form, name)


# --- berth cache sign, verify --------------------------------------------------------------------------------------


def berth(*arguments: str, password: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(command_line(), ["cache", *arguments], env={"BERTH_KEY_PASSWORD": password or None})
    return result.exit_code, result.output


async def test_what_berth_signs_cosign_verifies(real_registry: RealRegistry, cosign: Cosign, tmp_path: Path) -> None:
    key = new_key()
    secret = serialization.BestAvailableEncryption(b"open sesame")
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    (tmp_path / "key.pub").write_text(public_pem(key))
    image = await pushed(real_registry, "berth/signed")
    insecure = ("--insecure", real_registry.host)
    named = str(image)

    def both() -> None:
        code, text = berth("verify", named, "--key", str(tmp_path / "key.pub"), *insecure)
        assert code == 1 and "has no signature, neither a bundle beside it nor a .sig tag" in text
        code, text = berth("sign", named, "--key", str(tmp_path / "key.pem"), *insecure)
        assert code == 1 and "it is encrypted, and no password was given" in text
        code, text = berth("sign", named, "--key", str(tmp_path / "key.pem"), *insecure, password="wrong")
        assert code == 1 and "the password is another" in text
        code, text = berth("sign", named, "--key", str(tmp_path / "key.pem"), *insecure, password="open sesame")
        assert (code, text) == (0, f"{image.registry}/{image.repository}@{DIGEST}\n")
        code, text = berth("verify", named, "--key", str(tmp_path / "key.pub"), *insecure)
        assert code == 0 and "verified: " in text and "signed by the key of key.pub" in text
        code, text = berth("verify", named, *insecure)
        assert code == 1 and "nothing to check against" in text

    await asyncio.to_thread(both)
    verified = cosign.run("verify", "--key", str(tmp_path / "key.pub"), "--insecure-ignore-tlog", named)
    assert hashlib.sha256(MANIFEST).hexdigest() in verified


async def test_policies_from_files(real_registry: RealRegistry, made: Mapping[str, Any], tmp_path: Path) -> None:
    image = await pushed(real_registry, "berth/keyless")
    await attach(real_registry, image, made["bundles"]["good"])
    (tmp_path / "root.json").write_text(json.dumps(made["trustedRoot"]))
    spec = {
        "images": [f"{real_registry.host}/berth/*"],
        "namespaces": ["serving"],
        "signers": [ALICE.model_dump(by_alias=True, exclude_none=True)],
    }
    file = tmp_path / "policy.yaml"
    file.write_text(
        json.dumps(
            {"apiVersion": "tkm.io/v1alpha1", "kind": "KernelCachePolicy", "metadata": {"name": "people"}, "spec": spec}
        )
    )
    common = ("verify", str(image), "--policy", str(file), "--insecure", real_registry.host, "--json")

    def run() -> None:
        code, text = berth(*common, "-n", "serving", "--trusted-root", str(tmp_path / "root.json"))
        assert code == 0 and json.loads(text)["reason"] == "Verified"
        code, text = berth(*common, "-n", "serving")
        assert code == 1 and "where its trusted root should be" in json.loads(text)["message"]
        code, text = berth(*common, "-n", "other", "--trusted-root", str(tmp_path / "root.json"))
        assert code == 1 and json.loads(text)["reason"] == "NoPolicy"

    await asyncio.to_thread(run)
