"""`berth controller`, `worker` and `node`: the long-running processes, as the image and the stack start them."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from berth.process import ProcessOptions

Kubeconfig = Annotated[
    Path | None, typer.Option(help="Kubeconfig file; left out: KUBECONFIG, then the pod's own service account.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
Address = Annotated[
    str | None, typer.Option("--temporal-address", help="host:port; left out: TEMPORAL_ADDRESS or a profile.")
]
Namespace = Annotated[str | None, typer.Option("--temporal-namespace", help="Left out: TEMPORAL_NAMESPACE or default.")]
HealthPort = Annotated[int, typer.Option(help="Port of /healthz and /readyz.")]
MetricsPort = Annotated[int, typer.Option(help="Port of /metrics.")]
Bind = Annotated[str, typer.Option(help="Address that the ports listen on.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def register(app: typer.Typer) -> None:
    for command in (controller, worker):
        app.command()(_with_process_options(command))
    # Imported here, for it takes its options' types from this module.
    from berth.cli.devices_commands import inspect as inspect_node

    group = typer.Typer(invoke_without_command=True)
    group.callback()(_with_process_options(node))
    group.command("inspect")(inspect_node)
    app.add_typer(group, name="node")


def _process_options(
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    temporal_address: Address = None,
    temporal_namespace: Namespace = None,
    health_port: HealthPort = 8081,
    metrics_port: MetricsPort = 8080,
    bind: Bind = "0.0.0.0",  # noqa: S104  # the kubelet and Prometheus come from outside the pod
    log_level: LogLevel = "info",
) -> ProcessOptions:
    from berth.process import ProcessOptions

    return ProcessOptions(
        kubeconfig, context, temporal_address, temporal_namespace, health_port, metrics_port, bind, log_level
    )


def _with_process_options(run: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of every process, which reach `run` as its `options`, before its own."""
    # What is imported only when a process starts stands in neither option: any value does for its name.
    unknown = {"ProcessOptions": object}
    common = inspect.signature(_process_options, eval_str=True, locals=unknown).parameters
    taken = inspect.signature(run, eval_str=True, locals=unknown).parameters
    own = [each for name, each in taken.items() if name != "options"]

    @wraps(run)
    def command(**given: Any) -> None:
        options = _process_options(**{name: given.pop(name) for name in common})
        run(options=options, **given)

    # Typer reads a command's options from here.
    every = [each.replace(kind=each.KEYWORD_ONLY) for each in (*common.values(), *own)]
    vars(command)["__signature__"] = inspect.Signature(every)
    command.__annotations__ = {each.name: each.annotation for each in every}
    return command


def controller(
    options: ProcessOptions,
    resync: Annotated[float, typer.Option(help="Seconds between sweeps.")] = 600.0,
    webhook_port: Annotated[int, typer.Option(help="Port of the admission webhooks.")] = 9443,
) -> None:
    """Watch the cluster and poke the workflows that a change concerns (one leader at a time); answer its webhooks."""
    from berth.controller_process import run_controller

    run_controller(options, resync=resync, webhook_port=webhook_port)


def worker(
    options: ProcessOptions,
    make_current: Annotated[
        bool, typer.Option("--make-current", help="Take over from another build of the worker (an upgrade).")
    ] = False,
) -> None:
    """Run the control plane's workflows and activities."""
    from berth.worker_process import run_worker

    run_worker(options, take_over=make_current)


def node(
    called: typer.Context,
    options: ProcessOptions,
    node_name: Annotated[
        str, typer.Option(envvar="NODE_NAME", help="This node's name in the cluster (the pod's spec.nodeName).")
    ] = "",
    root: Annotated[
        Path, typer.Option(help="Folder of the node's ledger, its kernel caches and pods' writable layers.")
    ] = Path("/var/lib/berth"),
    kubelet_root: Annotated[Path, typer.Option(help="What the kubelet has as --root-dir, under the same path.")] = Path(
        "/var/lib/kubelet"
    ),
    quota: Annotated[str, typer.Option(help="What kernel caches may take on the disk.")] = "100Gi",
    upper_limit: Annotated[str, typer.Option(help="What one pod may write into a kernel cache's volume.")] = "4Gi",
    simulated_gpus: Annotated[
        str, typer.Option(metavar="TEXT", help="GPUs that are pretended, such as 2xH100; left out: those there are.")
    ] = "",
    device_plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Resources to offer by device plugin, such as 'tenstorrent.com/*'."),
    ] = None,
    dra: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Resources to offer by DRA, such as nvidia.com/gpu.")
    ] = None,
    gpu_shares: Annotated[
        int, typer.Option(min=1, max=64, help="As how many devices each whole NVIDIA GPU counts.")
    ] = 1,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE=NAME", help="Offer a Tenstorrent card type under another name: p150a=p150."),
    ] = None,
    seats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A GPUSeatProfile; left out: those of the cluster.")
    ] = None,
    cdi_folder: Annotated[Path, typer.Option(help="Where the container runtime looks for CDI files.")] = Path(
        "/var/run/cdi"
    ),
    host_root: Annotated[
        Path, typer.Option(help="Where the host's root (or its /usr alone) is, with the libraries of NVIDIA's driver.")
    ] = Path("/"),
    reset_before_start: Annotated[
        bool,
        typer.Option(
            "--reset-before-start",
            help="Reset a Tenstorrent card that nobody holds before a container starts with it (tt-kmd 2.10).",
        ),
    ] = False,
    simulated_machine: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A machine with devices that are pretended, as YAML.")
    ] = None,
    switch_seats: Annotated[
        bool,
        typer.Option(
            "--switch-seats",
            help="Let the model servers of a group of GPUs take turns; left out, seats are only given.",
        ),
    ] = False,
    seat_proxy: Annotated[
        str, typer.Option(metavar="PROGRAM", help="What carries seats' requests; '' where it is started otherwise.")
    ] = "seat-proxy",
    seat_address: Annotated[
        str, typer.Option(metavar="IP", help="Where seats' requests come to: the node's address in the cluster.")
    ] = "0.0.0.0",  # noqa: S104  # any of the node's, as for other ports of it
    container_runtime: Annotated[
        Path, typer.Option(metavar="SOCKET", help="The container runtime's, which tells of seats' processes.")
    ] = Path("/run/containerd/containerd.sock"),
) -> None:
    """Serve one node: offer its devices to pods, mount kernel caches into them, and prepare these as the control plane
    asks.
    """
    if called.invoked_subcommand is not None:
        return
    if not node_name:
        raise typer.BadParameter("is needed: the node's name in the cluster.", param_hint="--node-name")
    # Its handlers may end a child between fork and exec, and no child of ours goes on with gRPC.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    from berth.node_process import NodeOptions, run_node
    from nodeworkers.devices.core import FrontEnds
    from nodeworkers.devices.service import DeviceOptions
    from nodeworkers.hardware.simulated import simulated_gpus as read_gpus
    from nodeworkers.seats.service import SeatOptions
    from planning.devices.offering import Terms

    if simulated_gpus:
        try:
            read_gpus(simulated_gpus)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--simulated-gpus") from None
    run_node(
        options,
        NodeOptions(
            node_name,
            root.absolute(),
            kubelet_root.absolute(),
            size_of(quota, "--quota"),
            size_of(upper_limit, "--upper-limit"),
            simulated_gpus,
            DeviceOptions(
                FrontEnds(tuple(device_plugin or ()), tuple(dra or ())),
                Terms(gpu_shares, _aliases(family or [])),
                simulated_machine and simulated_machine.absolute(),
                seats and seats.absolute(),
                cdi_folder.absolute(),
                host_root.absolute(),
                reset_before_start,
                switch_seats,
            ),
            SeatOptions(_program(seat_proxy), seat_address, container_runtime, simulated_machine is not None)
            if switch_seats
            else None,
        ),
    )


def _aliases(families: list[str]) -> dict[str, str]:
    found = {}
    for each in families:
        kind, equals, name = each.partition("=")
        if not (kind and equals and name):
            raise typer.BadParameter(f"{each!r} is not TYPE=NAME, such as p150a=p150.", param_hint="--family")
        found[f"tenstorrent.com/{kind}"] = f"tenstorrent.com/{name}"
    return found


def size_of(text: str, option: str) -> int:
    """A size as Kubernetes writes it (`100Gi`, `500M`), in bytes. Raises BadParameter, which names the option."""
    from planning.quantities import quantity

    try:
        size = int(quantity(text))
    except ValueError:
        size = 0
    if not 0 < size < 2**63:
        raise typer.BadParameter(f"{text!r} is no size, such as 100Gi or 500M.", param_hint=option)
    return size


def _program(name: str) -> Path | None:
    """Where a program is; None for none. Raises BadParameter."""
    if not name:
        return None
    found = shutil.which(name)
    if found is None:
        told = f"there is no {name}: `make native` builds seat-proxy, or say where it is."
        raise typer.BadParameter(told, param_hint="--seat-proxy")
    return Path(found).absolute()
