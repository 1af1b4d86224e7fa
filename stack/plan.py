"""Decides what a stack consists of: which programs it needs, its ports, its processes and its endpoints.

For `Stack.up`, which carries it out. Writes certificates and configuration files, starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stack import control_plane, kubeproxy, ports, realnode, temporal
from stack.endpoints import APPLICATION_PORTS, Endpoints
from stack.external import check_server, check_temporal, take_context
from stack.options import UpOptions
from stack.paths import Layout
from stack.process import ProcessSpec
from stack.tools import Found

_PREFERRED = {"temporal": 7233, "temporal-ui": 8233, "kube-apiserver": 6443}
"""What people expect; taken only for the default data folder, and only when free."""


@dataclass(frozen=True)
class Plan:
    """`first` can be started at once; `second` wants the cluster's manifests applied.

    `without_services`: why a real node is to have no kube-proxy, the second half of a sentence.
    """

    endpoints: Endpoints
    first: list[ProcessSpec]
    second: list[ProcessSpec]
    without_services: str = ""


def needed_tools(options: UpOptions) -> list[str]:
    """The programs that these options call for."""
    result: list[str] = []
    if options.temporal is None:
        result.append("temporal")
    if options.cluster is None:
        result += control_plane.TOOLS
        if options.kwok:
            result.append("kwok")
        if options.real_node:
            result += realnode.TOOLS
    return result


def port_names(options: UpOptions) -> list[str]:
    """The ports that these options call for."""
    result = list(APPLICATION_PORTS)
    if options.temporal is None:
        result += temporal.PORTS
    if options.cluster is None:
        result += control_plane.PORTS
        if options.real_node:
            result += realnode.PORTS
    return result


def choose_ports(layout: Layout, options: UpOptions, kept: Mapping[str, int], default: Path) -> dict[str, int]:
    """Free ports, the same ones as before where they are still free."""
    return ports.choose(port_names(options), kept, _PREFERRED if layout.root == default else None)


def make_plan(layout: Layout, options: UpOptions, found: Mapping[str, Found], chosen: Mapping[str, int]) -> Plan:
    """Everything that can be settled before anything is started. Raises StackError for what is missing outside."""
    first: list[ProcessSpec] = []
    second: list[ProcessSpec] = []
    programs = {name: each.path for name, each in found.items()}
    kubernetes: dict[str, object] = {}
    without_services = ""
    if options.temporal is None:
        (layout.root / "temporal").mkdir(exist_ok=True, mode=0o700)
        first.append(temporal.server(layout, programs["temporal"], chosen, options))
    else:
        check_temporal(options.temporal)
    if options.cluster is None:
        has = control_plane.make_credentials(layout)
        configs = control_plane.write_kubeconfigs(layout, has, chosen["kube-apiserver"])
        first.append(control_plane.etcd(layout, programs["etcd"], chosen, has, options))
        first.append(control_plane.apiserver(layout, programs["kube-apiserver"], chosen, has, options))
        name = "kube-controller-manager"
        first.append(control_plane.controller_manager(programs[name], chosen, has, configs[name], options))
        name = "kube-scheduler"
        first.append(control_plane.scheduler(layout, programs[name], chosen, has, configs[name]))
        if options.kwok:
            second.append(control_plane.kwok(layout, programs, chosen, configs["kwok"], options))
        if options.real_node:
            second += realnode.specs(layout, programs, chosen, has.kubernetes, options)
            without_services = kubeproxy.obstacle(layout)
            if not without_services:
                program, after = programs["kube-proxy"], realnode.KUBELET
                second.append(kubeproxy.spec(layout, program, chosen, has.kubernetes, options, after))
        kubernetes = {
            "apiserver": f"https://127.0.0.1:{chosen['kube-apiserver']}",
            "etcd_endpoint": f"https://127.0.0.1:{chosen['etcd']}",
            "etcd_ca": has.etcd_authority.cert,
            "etcd_cert": has.etcd_client.cert,
            "etcd_key": has.etcd_client.key,
        }
    else:
        configs = {"admin": layout.kubeconfig("external")}
        kubernetes = {"apiserver": take_context(options.cluster, configs["admin"])}
        check_server(str(kubernetes["apiserver"]), "The cluster's API server")
    outside = options.temporal
    endpoints = Endpoints(
        data=layout.root,
        temporal_address=outside.address if outside else f"127.0.0.1:{chosen['temporal']}",
        temporal_namespace=outside.namespace if outside else temporal.NAMESPACE,
        temporal_ui=None if outside or not options.temporal_ui else f"http://127.0.0.1:{chosen['temporal-ui']}",
        temporal_tls=outside.uses_tls if outside else False,
        temporal_tls_ca=_absolute(outside.tls_ca) if outside else None,
        temporal_tls_cert=_absolute(outside.tls_cert) if outside else None,
        temporal_tls_key=_absolute(outside.tls_key) if outside else None,
        temporal_tls_server_name=outside.tls_server_name if outside else None,
        temporal_api_key_env=outside.api_key_env if outside else None,
        kubeconfigs=configs,
        embedded_cluster=options.cluster is None,
        embedded_temporal=outside is None,
        ports=dict(chosen),
        versions={name: each.version for name, each in found.items()},
        tools=programs,
        **kubernetes,  # type: ignore[arg-type]  # its values are those that the fields want
    )
    return Plan(endpoints, first, second, without_services)


def _absolute(file: Path | None) -> Path | None:
    """The processes that read the file work in another folder than the person who named it."""
    return file.absolute() if file else None
