"""Where an image is asked for, by which proxy, and which addresses a registry may name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from crds.settings import Settings as Installation
from images.endpoints import BadSettings, Settings, elsewhere, endpoints, forbidden, proxy_for, settings_of
from images.reference import Reference


def urls(settings: Settings, text: str) -> list[str]:
    return [str(each.path("manifests/v1")) for each in endpoints(settings, Reference.parse(text))]


def test_mirrors_come_first_and_have_paths_of_their_own() -> None:
    settings = Settings(
        mirrors={"r.example": ("m1.example", "m2.example:5000/proxy/r")}, insecure=frozenset({"m2.example:5000"})
    ).checked()
    assert urls(settings, "r.example/team/cache:v1") == [
        "https://m1.example/v2/team/cache/manifests/v1",
        "http://m2.example:5000/v2/proxy/r/team/cache/manifests/v1",
        "https://r.example/v2/team/cache/manifests/v1",
    ]
    assert urls(settings, "other.example/a:v1") == ["https://other.example/v2/a/manifests/v1"]
    assert len(endpoints(settings, Reference.parse("r.example/a"), mirrors=False)) == 1


def test_docker_hub_answers_elsewhere() -> None:
    (endpoint,) = endpoints(Settings(), Reference.parse("docker.io/a:v1"))
    assert str(endpoint.path("manifests/v1")) == "https://registry-1.docker.io/v2/library/a/manifests/v1"
    assert endpoint.name == "docker.io", "credentials are looked up by this"


def test_only_what_is_configured_is_plain_http() -> None:
    """Not even this machine, which others take for safe."""
    for host in ("localhost:5000", "127.0.0.1:5000", "[::1]:5000"):
        assert urls(Settings(), f"{host}/a:v1")[0].startswith("https://")
        assert urls(Settings(insecure=frozenset({host})), f"{host}/a:v1")[0].startswith("http://")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Settings(mirrors={"r.example": ("https://m.example",)}), "mirrors: 'https://m.example'"),
        (Settings(mirrors={"r.example": ("m.example/UP",)}), "mirrors: "),
        (Settings(mirrors={"R.example": ()}), "mirrors: 'R.example' must be written as 'r.example'"),
        (Settings(insecure=frozenset({"http://r.example"})), "insecure: "),
        (Settings(authorities="-----BEGIN CERTIFICATE-----\nx"), "authorities: must be certificates in PEM"),
        (Settings(authorities="nonsense"), "authorities: must be certificates in PEM"),
        (Settings(proxy="proxy.example:3128"), "proxy: must be a URL"),
        (Settings(proxy="socks5://proxy.example"), "proxy: must be a URL"),
        (Settings(proxy="http://proxy.example:99999"), "proxy: must be a URL"),
    ],
)
def test_settings_that_cannot_be_used(settings: Settings, told: str) -> None:
    with pytest.raises(BadSettings) as caught:
        settings.checked()
    assert told in str(caught.value)


ENVIRONMENT = {
    "HTTPS_PROXY": "http://secure.example:3128",
    "http_proxy": "plain.example:8080",
    "NO_PROXY": "localhost, .internal ,exact.example,10.0.0.0/8,192.168.1.7,with.port:444,fd00::/8",
}


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://r.example/v2/", "http://secure.example:3128"),
        ("http://r.example/v2/", "http://plain.example:8080"),
        ("https://a.b.internal/", None),
        ("https://exact.example/", None),
        ("https://sub.exact.example/", None),
        ("https://inexact.example/", "http://secure.example:3128"),
        ("https://10.1.2.3/", None),
        ("https://11.1.2.3/", "http://secure.example:3128"),
        ("https://192.168.1.7:5000/", None),
        ("https://[fd00::1]/", None),
        ("https://with.port:444/", None),
        ("https://with.port/", "http://secure.example:3128"),
        ("https://127.0.0.1:5000/", None),
        ("https://127.8.8.8/", None),
        ("https://[::1]/", None),
        ("https://localhost/", None),
    ],
)
def test_proxies_of_the_environment(url: str, proxy: str | None) -> None:
    assert proxy_for(Settings(), URL(url), ENVIRONMENT) == proxy


def test_a_configured_proxy_wins_and_never_leads_to_this_machine() -> None:
    settings = Settings(proxy="http://p.example:1", no_proxy="r.example")
    assert proxy_for(settings, URL("https://a.b.internal/"), ENVIRONMENT) == "http://p.example:1"
    assert proxy_for(settings, URL("https://r.example/"), ENVIRONMENT) is None
    assert proxy_for(settings, URL("https://127.0.0.1/"), ENVIRONMENT) is None
    assert proxy_for(Settings(), URL("https://r.example/"), {"HTTPS_PROXY": "http://p", "NO_PROXY": "*"}) is None
    assert proxy_for(Settings(), URL("https://r.example/"), {}) is None


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("https://blobs.example/x?signature=y", False),
        ("https://10.0.0.1/", False),
        ("http://blobs.example/x", True),
        ("http://insecure.example:5000/x", False),
        ("http://insecure.example/x", True),
        ("ftp://blobs.example/x", True),
        ("file:///etc/passwd", True),
        ("https://user:pw@blobs.example/x", True),
    ],
)
def test_where_a_registry_may_send_us(url: str, refused: bool) -> None:
    settings = Settings(insecure=frozenset({"insecure.example:5000"}))
    assert bool(elsewhere(settings, URL(url))) == refused


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_addresses_that_no_registry_may_name(address: str) -> None:
    assert forbidden(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.0.2.7", "2001:db8::1", "fd00::1"])
def test_addresses_that_a_registry_may_name(address: str) -> None:
    assert not forbidden(address)


@given(st.text(max_size=40) | st.text("0123456789./:[]*,-", max_size=40), st.text("ab01.:[]", min_size=1, max_size=20))
def test_any_list_of_exceptions_is_read(exceptions: str, host: str) -> None:
    try:
        url = URL(f"https://{host}/")
    except ValueError:
        return
    assert proxy_for(Settings(), url, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": exceptions}) in (None, "http://p:1")


def test_what_berth_settings_says_of_registries() -> None:
    raw = {
        "registries": {
            "mirrors": {"r.example": ["m.example:5000/proxy/r"]},
            "insecure": ["m.example:5000"],
            "proxy": "http://proxy.example:3128",
            "noProxy": "10.0.0.0/8,.corp.example",
        }
    }
    installation, refused = Installation.parse(raw)
    assert installation is not None, refused
    settings = settings_of(installation.registries)
    assert urls(settings, "r.example/a:v1") == [
        "http://m.example:5000/v2/proxy/r/a/manifests/v1",
        "https://r.example/v2/a/manifests/v1",
    ]
    assert proxy_for(settings, URL("https://r.example"), {}) == "http://proxy.example:3128"
    assert proxy_for(settings, URL("https://r.corp.example"), {}) is None
    assert settings_of(Installation().registries) == Settings()


@pytest.mark.parametrize(
    ("registries", "told"),
    [
        ({"mirrors": {"r.example": ["https://m.example"]}}, "registries.mirrors: 'https://m.example'"),
        ({"authorities": "nonsense"}, "registries.authorities: must be certificates in PEM"),
        ({"proxy": "proxy.example"}, "registries.proxy: must be a URL"),
    ],
)
def test_a_mistake_in_it_is_told_by_its_path_and_stops_nobody_else(registries: dict[str, object], told: str) -> None:
    installation, refused = Installation.parse({"registries": registries})
    assert installation is not None, refused
    with pytest.raises(BadSettings) as caught:
        settings_of(installation.registries)
    assert str(caught.value).startswith(told)
