"""dockerconfigjson: whose credentials serve which image, and that no secret is ever shown."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.credentials import LIMIT, BadCredentials, Credentials

SECRET = "hunter2-of-all-places"


def basic(user: str, password: str = SECRET) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def parsed(auths: dict[str, Any]) -> Credentials:
    return Credentials.parse(json.dumps({"auths": auths}).encode())


def users(credentials: Credentials, registry: str, repository: str) -> list[str]:
    found = credentials.find(registry, repository)
    return [base64.b64decode(each.authorization.removeprefix("Basic ")).decode().split(":")[0] for each in found]


@pytest.mark.parametrize(
    ("entry", "decoded"),
    [
        ({"auth": basic("u")}, f"u:{SECRET}"),
        ({"auth": basic("u").rstrip("=")}, f"u:{SECRET}"),
        ({"auth": basic("u", "a:b:c")}, "u:a:b:c"),
        ({"username": "u", "password": SECRET}, f"u:{SECRET}"),
        ({"username": "other", "password": "x", "auth": basic("u")}, f"u:{SECRET}"),
        ({"username": "ü", "password": "ß"}, "ü:ß"),
    ],
)
def test_forms_of_an_entry(entry: dict[str, str], decoded: str) -> None:
    (found,) = parsed({"r.example": entry}).find("r.example", "a")
    assert base64.b64decode(found.authorization.removeprefix("Basic ")).decode() == decoded


def test_an_identity_token_is_kept_apart() -> None:
    (found,) = parsed({"r.example": {"auth": basic("00000000", ""), "identitytoken": SECRET}}).find("r.example", "a")
    assert found.identity_token == SECRET


@pytest.mark.parametrize(
    ("key", "registry", "repository", "serves"),
    [
        ("r.example", "r.example", "team/cache", True),
        ("https://r.example", "r.example", "team/cache", True),
        ("http://r.example/", "r.example", "team/cache", True),
        ("https://r.example/v1/", "r.example", "team/cache", True),
        ("https://r.example/v2/", "r.example", "team/cache", True),
        ("r.example/team", "r.example", "team/cache", True),
        ("r.example/team", "r.example", "teammate/cache", True),  # so does the kubelet: the prefix is of the text
        ("r.example/other", "r.example", "team/cache", False),
        ("r.example:5000", "r.example", "team/cache", False),
        ("r.example", "r.example:5000", "team/cache", False),
        ("r.example:5000", "r.example:5000", "team/cache", True),
        ("*.example", "r.example", "a", True),
        ("*.example", "a.r.example", "a", False),
        ("*.*.example", "a.r.example", "a", True),
        ("r[0-9].example", "r1.example", "a", True),
        ("r[^0-9].example", "r1.example", "a", False),
        ("*", "r.example", "a", False),
        ("user@r.example", "r.example", "a", True),
        ("[::1]:5000", "[::1]:5000", "a", True),
        ("", "r.example", "a", False),
        ("https://index.docker.io/v1/", "docker.io", "library/a", True),
        ("docker.io", "docker.io", "library/a", True),
        ("https://index.docker.io/v1/", "r.example", "library/a", False),
    ],
)
def test_matching_is_the_kubelets(key: str, registry: str, repository: str, serves: bool) -> None:
    assert users(parsed({key: {"auth": basic("u")}}), registry, repository) == (["u"] if serves else [])


def test_the_most_specific_comes_first() -> None:
    keys = ["r.example", "*.example", "r.example/team/cache", "r.example/team", "other.example/team/cache"]
    found = users(parsed({key: {"auth": basic(key)} for key in keys}), "r.example", "team/cache")
    assert found == ["r.example/team/cache", "r.example/team", "r.example", "*.example"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"{", "must be JSON"),
        (b"[]", "must be JSON"),
        (json.dumps({"auths": [SECRET]}).encode(), 'object "auths"'),
        (json.dumps({"auths": {"r.example": SECRET}}).encode(), "auths['r.example']: must be an object"),
        (json.dumps({"auths": {"r.example": {"auth": 7}}}).encode(), "auths['r.example'].auth: must be text"),
        (json.dumps({"auths": {"r.example": {"auth": f"%{SECRET}"}}}).encode(), "base64 of user:password"),
        (json.dumps({"auths": {"r.example": {"auth": "aHVudGVyMg=="}}}).encode(), "base64 of user:password"),
        (json.dumps({"auths": {"r.example": {"auth": "/////w=="}}}).encode(), "base64 of user:password"),
        (json.dumps({"auths": {f"https://me:{SECRET}@r.example": {"auth": "x"}}}).encode(), "auths['r.example'].auth"),
        (SECRET.encode(), "must be JSON"),
        (b" " * (LIMIT + 1), "longer than"),
    ],
)
def test_mistakes_are_told_by_place_and_without_secrets(data: bytes, told: str) -> None:
    with pytest.raises(BadCredentials) as caught:
        Credentials.parse(data)
    assert told in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None, "an exception of the parser's, which may hold the text, came along"


def test_what_says_nothing_is_anonymous() -> None:
    for data in (b"{}", b'{"auths":{}}', b'{"auths":{"r.example":{}},"credsStore":"x"}'):
        assert Credentials.parse(data).find("r.example", "a") == ()


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    credentials = parsed({"r.example": {"auth": basic("u"), "identitytoken": SECRET}})
    (one,) = credentials.find("r.example", "a")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger().info("%s %r %s %r %s", one, one, credentials, credentials, [vars(credentials)])
    shown = caplog.text + f"{one} {credentials!r}"
    assert SECRET not in shown and basic("u") not in shown


@given(st.binary(max_size=200))
def test_any_bytes_are_credentials_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadCredentials):
        Credentials.parse(data).find("r.example", "a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
ENTRY = JSON | st.fixed_dictionaries(
    {}, optional={name: st.text(max_size=12) | JSON for name in ("auth", "username", "password", "identitytoken")}
)


@given(st.dictionaries(st.text(max_size=20) | st.text("ab*?[]^-.:/@#", max_size=20), ENTRY, max_size=4), st.data())
def test_any_entries_are_credentials_or_refused(auths: dict[str, Any], data: st.DataObject) -> None:
    try:
        credentials = parsed(auths)
    except BadCredentials:
        return
    registry = data.draw(st.sampled_from([*auths, "r.example", "[::1]:80", ""]))
    for each in credentials.find(registry, data.draw(st.text(max_size=5))):
        assert each.authorization.startswith("Basic ")


def secret(content: bytes, **changed: Any) -> dict[str, Any]:
    data = {".dockerconfigjson": base64.b64encode(content).decode()}
    return {"type": "kubernetes.io/dockerconfigjson", "data": data, **changed}


def test_a_secret_as_the_api_server_gives_it() -> None:
    credentials = Credentials.from_secret(secret(json.dumps({"auths": {"r.example": {"auth": basic("u")}}}).encode()))
    assert users(credentials, "r.example", "a") == ["u"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (secret(b"{}", type="Opaque"), "it is no Secret of type kubernetes.io/dockerconfigjson"),
        (secret(b"{}", type=None), "it is no Secret of type"),
        (secret(b"{}", data=None), "data: has no .dockerconfigjson"),
        (secret(b"{}", data={"token": SECRET}), "data: has no .dockerconfigjson"),
        (secret(b"{}", data={".dockerconfigjson": SECRET}), "data..dockerconfigjson: is not base64"),
        (secret(SECRET.encode()), 'the credentials must be JSON with an object "auths"'),
    ],
)
def test_a_secret_that_is_none_says_why_and_nothing_of_its_content(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadCredentials) as caught:
        Credentials.from_secret(given)
    assert str(caught.value).startswith(told)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
