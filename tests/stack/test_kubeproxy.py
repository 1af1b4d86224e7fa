"""kube-proxy's rules: whose they are, what keeps a machine from having them, and that nobody else's are touched.

In a network of its own, which the kernel gives a thread: the machine's rules are not seen here, and not changed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stack import Silent, StackError, UpOptions, kubeproxy, paths, realnode
from stack.paths import SYSTEM_PATH, Layout, NodeFolders, locked
from stack.pki import Authority
from stack.plan import make_plan, needed_tools, port_names
from stack.process import ProcessSpec
from stack.tools import TOOLS, Found

NFT = shutil.which("nft", path=SYSTEM_PATH) or ""
MINE = "a table of somebody else"
_NEW_NETWORK = 0x40000000

InNetwork = Callable[..., str]


@pytest.fixture
def network() -> Iterator[ThreadPoolExecutor]:
    """A thread with an empty network, which what it starts shares."""
    if not NFT:
        pytest.skip("needs nft (Debian's package nftables)")
    libc = ctypes.CDLL(None, use_errno=True)
    with ThreadPoolExecutor(1) as thread:
        if thread.submit(libc.unshare, _NEW_NETWORK).result() != 0:
            pytest.skip("needs the right to make a network (root)")
        yield thread


@pytest.fixture
def nft(network: ThreadPoolExecutor) -> InNetwork:
    def call(*arguments: str) -> str:
        run = network.submit(subprocess.run, [NFT, *arguments], capture_output=True, text=True, check=True)
        return str(run.result().stdout)

    call("add", "table", "ip", "theirs", f'{{ comment "{MINE}"; }}')
    call("add", "chain", "ip", "theirs", "input", "{ type filter hook input priority 0; }")
    call("add", "rule", "ip", "theirs", "input", "tcp", "dport", "7", "drop")
    return call


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(paths, "RUN", tmp_path / "run")
    return made(tmp_path / "data")


def made(root: Path) -> Layout:
    """A data folder with a node's folders, as after `up`."""
    result = Layout(root)
    result.create()
    folders = NodeFolders(result)
    folders.root.mkdir()
    folders.run.mkdir(parents=True)
    folders.stack.symlink_to(root)
    return result


def spec(layout: Layout) -> ProcessSpec:
    if not NFT:
        pytest.skip("needs nft (Debian's package nftables)")
    authority = Authority(layout.pki / "kubernetes", "test")
    ports = {name: 10000 + number for number, name in enumerate(("kube-apiserver", *kubeproxy.PORTS))}
    return kubeproxy.spec(layout, Path("/bin/true"), ports, authority, UpOptions(), "kubelet")


def claim(layout: Layout, nft: InNetwork) -> None:
    """What happens before kube-proxy starts, and what it does with the table then."""
    nft(*spec(layout).before[1:])
    for family in ("ip", "ip6"):
        nft("add", "table", family, "kube-proxy", '{ comment "rules for kube-proxy"; }')


def test_it_takes_a_table_with_its_own_mark_and_removes_that_alone(
    network: ThreadPoolExecutor, nft: InNetwork, layout: Layout
) -> None:
    before = nft("list", "ruleset")
    assert network.submit(kubeproxy.obstacle, layout).result() == ""
    claim(layout, nft)
    assert nft("list", "tables").splitlines() == ["table ip theirs", "table ip kube-proxy", "table ip6 kube-proxy"]
    assert network.submit(kubeproxy.obstacle, layout).result() == "", "its own is none"
    network.submit(kubeproxy.clean, layout).result()
    assert nft("list", "ruleset") == before
    network.submit(kubeproxy.clean, layout).result()


@pytest.mark.parametrize("comment", ['{ comment "rules for kube-proxy"; }', "", '{ comment "berth 0"; }'])
@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_somebody_elses_kube_proxy_is_an_obstacle_and_stays(
    network: ThreadPoolExecutor, nft: InNetwork, layout: Layout, family: str, comment: str
) -> None:
    nft("add", "table", family, "kube-proxy", *filter(None, [comment]))
    before = nft("list", "ruleset")
    told = network.submit(kubeproxy.obstacle, layout).result()
    assert "there is an nftables table kube-proxy already" in told and f"nft delete table {family} kube-proxy" in told
    network.submit(kubeproxy.clean, layout).result()
    assert nft("list", "ruleset") == before


def test_a_kube_proxy_of_iptables_is_an_obstacle(network: ThreadPoolExecutor, nft: InNetwork, layout: Layout) -> None:
    nft("add", "table", "ip", "nat")
    nft("add", "chain", "ip", "nat", "KUBE-KUBELET-CANARY")
    assert network.submit(kubeproxy.obstacle, layout).result() == "", "kubelets have chains too"
    nft("add", "chain", "ip", "nat", "KUBE-SERVICES")
    assert "through iptables" in network.submit(kubeproxy.obstacle, layout).result()


def test_it_finds_no_program_but_nft(layout: Layout) -> None:
    path = spec(layout).env["PATH"]
    assert shutil.which("nft", path=path)
    assert [file.name for file in Path(path).iterdir()] == ["nft"]


def test_its_file_is_written_when_it_says_something_new(layout: Layout) -> None:
    first = spec(layout)
    file = NodeFolders(layout).root / "kube-proxy.yaml"
    before = file.stat()
    assert spec(layout) == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    file.write_text("mode: iptables\n")
    spec(layout)
    assert "nftables" in file.read_text()


def test_what_a_killed_stack_left_is_removed_by_the_next_and_what_runs_is_not(
    network: ThreadPoolExecutor, nft: InNetwork, layout: Layout, tmp_path: Path
) -> None:
    before = nft("list", "ruleset")
    dead = made(tmp_path / "dead")
    claim(dead, nft)
    for lock in (dead.supervisor_lock, dead.lock):  # it runs, or is about to
        with locked(lock):
            network.submit(realnode.clean_abandoned, layout).result()
            told = network.submit(kubeproxy.obstacle, layout).result()
            assert f"berth {NodeFolders(dead).tag}" in told
    network.submit(realnode.clean_abandoned, layout).result()
    assert not NodeFolders(dead).run.exists() and NodeFolders(layout).run.exists()
    assert network.submit(kubeproxy.obstacle, layout).result() == ""
    assert nft("list", "ruleset") == before


def test_where_nft_is_missing_or_does_not_work_it_says_so(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "nft"
    broken.touch(mode=0o755)
    monkeypatch.setattr(kubeproxy, "SYSTEM_PATH", str(tmp_path))
    for script, told in (
        ("echo 'nftables v0.9.8 (E.D.S.)'", "needs 1.0.1 or newer of nft, which says 'nftables v0.9.8 (E.D.S.)'"),
        ("exit 1", "needs 1.0.1 or newer of nft, which says ''"),
        ("echo v1.0.1; echo 'you must be root' >&2; [ $1 = --version ]", "nft does not work here: you must be root"),
        ("echo v1.0.1; [ $1 = --version ]", "nft does not work here: it says nothing"),
    ):
        broken.write_text(f"#!/bin/sh\n{script}\n")
        assert told in kubeproxy.obstacle(layout)
        kubeproxy.clean(layout)
    broken.unlink()
    assert "no program nft" in kubeproxy.obstacle(layout)
    kubeproxy.clean(layout)


ROUTE = "eth0\t{}\t00000000\t0001\t0\t0\t0\t{}\t0\t0\t0\n"


@pytest.mark.parametrize(
    ("resolvers", "routes", "taken"),
    [
        ("nameserver 192.0.2.1\nsearch x\n", ROUTE.format("00000000", "00000000"), ""),
        ("nameserver 10.96.0.10\n", "", "the name server 10.96.0.10"),
        ("nameserver fd00::1\nnameserver\n\noptions ndots:5\n", "", ""),
        ("", ROUTE.format("0005600A", "00FFFFFF"), "10.96.5.0/24"),
        ("", ROUTE.format("0000000A", "000000FF"), ""),  # 10.0.0.0/8 is everything's, as the default route is
    ],
)
def test_addresses_that_the_machine_needs_are_not_taken_from_it(
    tmp_path: Path, resolvers: str, routes: str, taken: str
) -> None:
    (tmp_path / "resolv.conf").write_text(resolvers)
    (tmp_path / "route").write_text("Iface\tDestination\n" + routes)
    assert kubeproxy.in_range(tmp_path / "resolv.conf", tmp_path / "route") == taken
    assert kubeproxy.in_range(tmp_path / "none", tmp_path / "none") == ""


@pytest.mark.parametrize("why", ["", "there is no program nft"])
def test_a_node_goes_on_without_services(layout: Layout, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    options = UpOptions(real_node=True)
    monkeypatch.setattr(realnode, "specs", lambda *_: [ProcessSpec("kubelet", ("true",))])
    monkeypatch.setattr(kubeproxy, "obstacle", lambda _: why)
    monkeypatch.setattr(kubeproxy, "spec", lambda *_: ProcessSpec("kube-proxy", ("true",), after=("kubelet",)))
    found = {name: Found(TOOLS[name], Path("/bin/true"), "1", "test") for name in needed_tools(options)}
    plan = make_plan(layout, options, found, dict.fromkeys(port_names(options), 10000))
    assert plan.without_services == why
    assert [each.name for each in plan.second] == ["kwok", "kubelet", *([] if why else ["kube-proxy"])]


def test_only_what_services_need_may_fail_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/asked\necho 'no such package' >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{SYSTEM_PATH}")
    monkeypatch.setattr(realnode, "unavailable", lambda: "")
    monkeypatch.setattr(realnode, "_PACKAGES", {})
    monkeypatch.setattr(realnode, "_FOR_SERVICES", {"rules": ("no-such-program",)})
    realnode.prepare(UpOptions(real_node=True), Silent())
    assert (tmp_path / "asked").read_text() == "install -y --no-install-recommends rules\n"
    monkeypatch.setattr(realnode, "_PACKAGES", {"needed": ("no-such-program",)})
    with pytest.raises(StackError, match=r"(?s)needed could not be installed:\s+no such package"):
        realnode.prepare(UpOptions(real_node=True), Silent())
