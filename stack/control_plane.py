"""The Kubernetes part of the plan: etcd, kube-apiserver, controller-manager, scheduler and kwok, with their files.

For `Stack.up`. Everything listens on loopback, speaks TLS where secrets pass, and obeys RBAC; the flags differ from
kubeadm's only where a comment says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from stack.kwok import configuration
from stack.options import UpOptions
from stack.paths import Layout, write_atomic
from stack.pki import IDENTITIES, Authority, Identity, Pair, signing_key, write_kubeconfig
from stack.process import Probe, ProcessSpec

PORTS = ("etcd", "etcd-peer", "etcd-metrics", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
SERVICE_RANGE = "10.96.0.0/16"
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Credentials:
    """Every certificate that the control plane uses."""

    kubernetes: Authority
    etcd_authority: Pair
    etcd_server: Pair
    etcd_client: Pair
    apiserver: Pair
    loopback: Pair
    kubelet_client: Pair
    admin: Pair
    proxy_authority: Pair
    proxy_client: Pair
    service_accounts: Pair


def make_credentials(layout: Layout) -> Credentials:
    """Makes what is missing or will soon end, and keeps the rest."""
    kubernetes = Authority(layout.pki / "kubernetes", "berth-kubernetes")
    etcd = Authority(layout.pki / "etcd", "berth-etcd")
    proxy = Authority(layout.pki / "front-proxy", "berth-front-proxy")
    inside = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    return Credentials(
        kubernetes=kubernetes,
        etcd_authority=etcd.pair,
        etcd_server=etcd.server("etcd", _LOCAL, also_client=True),
        etcd_client=etcd.client("apiserver", Identity("kube-apiserver")),
        apiserver=kubernetes.server("kube-apiserver", (*_LOCAL, *inside, "10.96.0.1")),
        loopback=kubernetes.server("components", _LOCAL),
        kubelet_client=kubernetes.client("apiserver-kubelet", Identity("berth:apiserver-kubelet-client")),
        admin=kubernetes.client("admin", IDENTITIES["admin"]),
        proxy_authority=proxy.pair,
        proxy_client=proxy.client("client", Identity("front-proxy-client")),
        service_accounts=signing_key(layout.pki),
    )


def write_kubeconfigs(layout: Layout, credentials: Credentials, port: int) -> dict[str, Path]:
    """One kubeconfig for each identity."""
    result = {}
    for name, identity in IDENTITIES.items():
        result[name] = layout.kubeconfig(name)
        client = credentials.kubernetes.client(name, identity)
        write_kubeconfig(result[name], f"https://127.0.0.1:{port}", credentials.kubernetes.pair, client, name)
    return result


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def etcd(layout: Layout, program: Path, ports: Mapping[str, int], has: Credentials, options: UpOptions) -> ProcessSpec:
    """etcd, for clients with a certificate of its own authority only."""
    client, peer = f"https://127.0.0.1:{ports['etcd']}", f"https://127.0.0.1:{ports['etcd-peer']}"
    tls = {
        f"{prefix}{name}": value
        for prefix in ("", "peer_")
        for name, value in {
            "cert_file": has.etcd_server.cert,
            "key_file": has.etcd_server.key,
            "trusted_ca_file": has.etcd_authority.cert,
            "client_cert_auth": "true",
        }.items()
    }
    flags = _flags(
        name="berth",
        data_dir=layout.root / "etcd",
        listen_client_urls=client,
        advertise_client_urls=client,
        listen_peer_urls=peer,
        initial_advertise_peer_urls=peer,
        initial_cluster=f"berth={peer}",
        listen_metrics_urls=f"http://127.0.0.1:{ports['etcd-metrics']}",
        quota_backend_bytes=8 * 1024**3,
        snapshot_count=10000,
        log_level="warn",
        **tls,
    )
    if not options.etcd_fsync:
        flags.append("--unsafe-no-fsync")
    probe = Probe("http", f"http://127.0.0.1:{ports['etcd-metrics']}/readyz")
    return ProcessSpec("etcd", (str(program), *flags), ready=(probe,), port=ports["etcd"])


def apiserver(
    layout: Layout, program: Path, ports: Mapping[str, int], has: Credentials, options: UpOptions
) -> ProcessSpec:
    """kube-apiserver with TLS, client certificates, service account tokens, RBAC and the usual admission plugins."""
    port = ports["kube-apiserver"]
    flags = _flags(
        etcd_servers=f"https://127.0.0.1:{ports['etcd']}",
        etcd_cafile=has.etcd_authority.cert,
        etcd_certfile=has.etcd_client.cert,
        etcd_keyfile=has.etcd_client.key,
        bind_address="127.0.0.1",
        secure_port=port,
        tls_cert_file=has.apiserver.cert,
        tls_private_key_file=has.apiserver.key,
        client_ca_file=has.kubernetes.pair.cert,
        kubelet_certificate_authority=has.kubernetes.pair.cert,
        kubelet_client_certificate=has.kubelet_client.cert,
        kubelet_client_key=has.kubelet_client.key,
        kubelet_preferred_address_types="InternalIP",
        requestheader_client_ca_file=has.proxy_authority.cert,
        requestheader_allowed_names="front-proxy-client",
        requestheader_extra_headers_prefix="X-Remote-Extra-",
        requestheader_group_headers="X-Remote-Group",
        requestheader_username_headers="X-Remote-User",
        proxy_client_cert_file=has.proxy_client.cert,
        proxy_client_key_file=has.proxy_client.key,
        service_cluster_ip_range=SERVICE_RANGE,
        service_account_key_file=has.service_accounts.cert,
        service_account_signing_key_file=has.service_accounts.key,
        service_account_issuer="https://kubernetes.default.svc",
        authorization_mode="Node,RBAC",
        enable_admission_plugins="NodeRestriction",
        allow_privileged="true",
        event_ttl=options.event_ttl,
        # History is kept for audits by the fault tests: whoever wants every revision turns compaction off,
        # and an auditor can read what it finds only if built-in kinds are stored as JSON.
        etcd_compaction_interval="0" if options.keep_history else "5m",
        storage_media_type="application/json" if options.keep_history else "application/vnd.kubernetes.protobuf",
        # A machine without a default route has no address to advertise, and loopback must not become an endpoint.
        advertise_address="127.0.0.1",
        endpoint_reconciler_type="none",
        profiling="false",
    )
    url = f"https://127.0.0.1:{port}/readyz"
    probe = Probe("http", url, ca=str(has.kubernetes.pair.cert), cert=str(has.admin.cert), key=str(has.admin.key))
    return ProcessSpec(
        "kube-apiserver",
        (str(program), *flags),
        # A small cluster's heap is small, so that by default a third of the CPU goes into collecting it.
        env={"GOGC": "300", "GOMEMLIMIT": "2GiB"},
        after=("etcd",),
        ready=(probe,),
        port=port,
        stop_timeout=3,
    )


def _component(
    name: str, program: Path, ports: Mapping[str, int], has: Credentials, kubeconfig: Path, flags: list[str]
) -> ProcessSpec:
    port = ports[name]
    common = _flags(
        authentication_kubeconfig=kubeconfig,
        authorization_kubeconfig=kubeconfig,
        bind_address="127.0.0.1",
        secure_port=port,
        tls_cert_file=has.loopback.cert,
        tls_private_key_file=has.loopback.key,
        profiling="false",
        leader_elect="false",  # there is one of each, and a lease would delay its restart by 15 s
    )
    probe = Probe("http", f"https://127.0.0.1:{port}/healthz", ca=str(has.kubernetes.pair.cert))
    return ProcessSpec(
        name, (str(program), *flags, *common), after=("kube-apiserver",), ready=(probe,), port=port, stop_timeout=5
    )


def controller_manager(
    program: Path, ports: Mapping[str, int], has: Credentials, kubeconfig: Path, options: UpOptions
) -> ProcessSpec:
    """kube-controller-manager; its default of 20 requests/s would cap Jobs at 20/s."""
    flags = _flags(
        kubeconfig=kubeconfig,
        root_ca_file=has.kubernetes.pair.cert,
        service_account_private_key_file=has.service_accounts.key,
        use_service_account_credentials="true",
        cluster_signing_cert_file=has.kubernetes.pair.cert,
        cluster_signing_key_file=has.kubernetes.pair.key,
        kube_api_qps=500,
        kube_api_burst=1000,
        concurrent_job_syncs=50,
        concurrent_gc_syncs=20,
        concurrent_namespace_syncs=20,
    )
    if options.node_monitor_grace:
        flags += _flags(node_monitor_grace_period=options.node_monitor_grace)
    return _component("kube-controller-manager", program, ports, has, kubeconfig, flags)


def scheduler(
    layout: Layout, program: Path, ports: Mapping[str, int], has: Credentials, kubeconfig: Path
) -> ProcessSpec:
    """kube-scheduler; the request rate can only be set by its configuration file."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1000},
    }
    file = layout.config / "scheduler.yaml"
    write_atomic(file, yaml.safe_dump(config, sort_keys=False))
    return _component("kube-scheduler", program, ports, has, kubeconfig, _flags(config=file))


def kwok(
    layout: Layout, programs: Mapping[str, Path], ports: Mapping[str, int], kubeconfig: Path, options: UpOptions
) -> ProcessSpec:
    """kwok, which plays the kubelets of all nodes annotated for it.

    It takes a new name at every start, and would stand back from nodes that its former self holds until their leases
    end, 40 s later. So the leases go first, all but the real node's; it makes them anew at once.
    """
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    others = f"?fieldSelector=metadata.name!%3D{options.node_name}"
    forget = ("--kubeconfig", str(layout.kubeconfig("admin")), "delete", "--raw", leases + others)
    file = layout.config / "kwok.yaml"
    write_atomic(file, configuration(options.node_lease_seconds))
    flags = _flags(
        kubeconfig=kubeconfig,
        config=file,
        server_address=f"127.0.0.1:{ports['kwok']}",
        cidr="10.200.0.0/16",
        node_ip="127.0.0.1",
        v="WARN",  # it would log every patch
    )
    probe = Probe("http", f"http://127.0.0.1:{ports['kwok']}/healthz")
    # kwok must not find configuration of the person's own kwokctl.
    env = {"KWOK_WORKDIR": str(layout.root / "kwok"), "HOME": str(layout.root / "kwok")}
    return ProcessSpec(
        "kwok",
        (str(programs["kwok"]), *flags),
        env=env,
        after=("kube-apiserver",),
        ready=(probe,),
        port=ports["kwok"],
        stop_timeout=3,
        before=(str(programs["kubectl"]), *forget, "--request-timeout=5s"),
    )
