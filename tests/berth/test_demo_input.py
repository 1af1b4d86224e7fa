"""The demo's input: the extract, the proportional cut, the compressed run times, and what is made of them."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from pathlib import Path

import pytest

from berth.demo import extract, manifests, trace
from berth.demo.cut import RunTimes, compress, cut_nodes, holds, make_cut
from crds.gpuworkload import GPUWorkloadSpec
from stack import StackError, node_manifest


@pytest.fixture(scope="module")
def openb() -> trace.Trace:
    return trace.load()


def test_extract_is_the_whole_gpu_part_of_the_trace(openb: trace.Trace) -> None:
    assert len(openb.nodes) == 1213
    assert sum(node.gpus for node in openb.nodes) == 6212
    assert len(openb.pods) == 3986
    assert sum(pod.gpus for pod in openb.pods[:1000]) == 1043
    assert openb.pods[0].name == "openb-pod-0000"


def test_a_pod_never_scheduled_ran_from_its_creation(openb: trace.Trace) -> None:
    pods = {pod.name: pod for pod in openb.pods}
    assert pods["openb-pod-0061"].scheduled is None
    assert pods["openb-pod-0061"].seconds == 10001403 - 10001278
    assert pods["openb-pod-0017"].seconds == 10769854 - 9437497


def test_extract_is_made_again_from_the_original_form(tmp_path: Path) -> None:
    source, dest = tmp_path / "source", tmp_path / "dest"
    source.mkdir()
    (source / extract.NODES_SOURCE).write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\n")
    (source / extract.PODS_SOURCE).write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "whole,12000,16384,1,1000,,LS,Running,0,50,10\n"
        "shared,6000,12288,1,460,,LS,Running,0,50,10\n"
        "cpu,6000,12288,0,0,,LS,Running,0,50,10\n"
        "picky,6000,12288,2,1000,V100M16|V100M32,LS,Pending,5,50,\n"
    )
    assert extract.extract(source, dest) == {"nodes.csv": 1, "pods.csv.gz": 2}
    first = (dest / "pods.csv.gz").read_bytes()
    extract.extract(source, dest)
    assert (dest / "pods.csv.gz").read_bytes() == first
    found = trace.load(dest)
    assert [(pod.name, pod.seconds, pod.gpu_models) for pod in found.pods] == [
        ("whole", 40, ()),
        ("picky", 45, ("V100M16", "V100M32")),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        ("sn,cpu_milli\nn0,1\n", "has no column memory_mib"),
        ("sn,cpu_milli,memory_mib,gpu,model\nn0,many,1,1,T4\n", r"line 2: .*many"),
        ("sn,cpu_milli,memory_mib,gpu,model\nn0,1\n", "line 2"),
    ],
)
def test_a_bad_extract_is_named_by_file_and_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "nodes.csv").write_text(content)
    with pytest.raises(StackError, match=rf"nodes\.csv.*{complaint}"):
        trace.load(tmp_path)


def test_a_file_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("sn,cpu_milli,memory_mib,gpu,model\n")
    (tmp_path / "pods.csv.gz").write_bytes(b"not compressed")
    with pytest.raises(StackError, match=r"pods\.csv\.gz cannot be read"):
        trace.load(tmp_path)
    (tmp_path / "pods.csv.gz").write_bytes(gzip.compress(b"name\n")[:-4])
    with pytest.raises(StackError, match=r"pods\.csv\.gz cannot be read"):
        trace.load(tmp_path)


@pytest.mark.parametrize("gpus", [100, 400, 800, 3000, 6212])
def test_the_cut_keeps_the_proportions(openb: trace.Trace, gpus: int) -> None:
    cut = cut_nodes(openb.nodes, gpus)
    assert abs(sum(node.gpus for node in cut) - gpus) <= max(8, gpus * 0.03)
    share = gpus / 6212
    kept = Counter(node.kind for node in cut)
    for kind, count in Counter(node.kind for node in openb.nodes).items():
        assert abs(kept[kind] - count * share) <= 1  # no kind is off by more than a node
    names = [node.name for node in cut]
    assert names == sorted(set(names))
    assert cut_nodes(openb.nodes, gpus) == cut


@pytest.mark.parametrize("gpus", [0, -1, 6213])
def test_an_impossible_cut_is_refused(openb: trace.Trace, gpus: int) -> None:
    with pytest.raises(StackError, match="6212 GPUs"):
        cut_nodes(openb.nodes, gpus)


def test_the_demo_asks_for_more_than_there_is(openb: trace.Trace) -> None:
    cut = make_cut(openb)
    assert (len(cut.nodes), cut.gpus, len(cut.runs), cut.gpus_wanted) == (156, 804, 1000, 1043)
    assert cut.left_out == ()
    assert all(any(holds(node, run.pod) for node in cut.nodes) for run in cut.runs)
    assert sum(run.fails != 0 for run in cut.runs) == 30
    assert make_cut(openb) == cut
    assert make_cut(openb, seed=2) != cut


def test_a_small_cut_leaves_out_what_no_node_could_hold(openb: trace.Trace) -> None:
    cut = make_cut(openb, gpus=30, workloads=999)
    assert not any(node.model == "G3" for node in cut.nodes)
    assert cut.left_out == ("openb-pod-1639",)  # 120 cores are on no node but those with G3
    assert len(cut.runs) == 999


def test_more_workloads_than_the_trace_has_are_refused(openb: trace.Trace) -> None:
    with pytest.raises(StackError, match="3986"):
        make_cut(openb, workloads=4000)


def test_compression_keeps_order_and_bounds() -> None:
    times = RunTimes(shortest=5.0, longest=20.0)
    trace_times = [5, 100, 288, 288, 5702, 12_537_496]
    short = compress(trace_times, times)
    assert short == sorted(short)
    assert (short[0], short[-1]) == (5.0, 20.0)
    assert short[2] == short[3]
    # by logarithm: the geometric mean of the ends lies in the middle
    assert compress([10, 100, 1000], times)[1] == 12.5
    assert compress([7, 7], times) == [5.0, 5.0]
    assert compress([], times) == []


def test_workloads_are_what_the_models_accept(openb: trace.Trace) -> None:
    cut = make_cut(openb)
    for run in cut.runs:
        manifest = manifests.workload(run)
        spec, wrong = GPUWorkloadSpec.parse(manifest["spec"])
        assert spec is not None, wrong
        assert spec.gpu_count == run.pod.gpus
        env = {each["name"]: each["value"] for each in manifest["spec"]["env"]}
        assert re.fullmatch(r"\d+(\.\d+)?s", env["SIMULATED_RUN"])
        assert env.get("SIMULATED_EXIT") == ("1" if run.fails else None)
        assert "simulated" in manifest["spec"]["image"]


def test_a_required_model_becomes_a_node_selector(openb: trace.Trace) -> None:
    pod = trace.TracePod("p", 1000, 1024, 1, ("V100M16", "V100M32"), 0, 0, 9)
    cut = make_cut(trace.Trace(openb.nodes, (pod,)), workloads=1)
    assert manifests.workload(cut.runs[0])["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "V100M16"}


def test_simulated_nodes_have_the_sizes_of_the_trace(openb: trace.Trace) -> None:
    for node in openb.nodes:
        assert node.cpu_milli % 1000 == 0
        assert node.memory_mib % 1024 == 0
    made = node_manifest(manifests.simulated_node(openb.nodes[0]))
    assert made["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert made["metadata"]["labels"]["nvidia.com/gpu.product"] == "P100"
    assert made["metadata"]["labels"]["gpu.warp.dev/simulated"] == "true"


def test_extract_has_only_the_columns_that_are_read() -> None:
    folder = trace.default_folder()
    with gzip.open(folder / trace.PODS_FILE, "rt") as lines:
        assert tuple(next(csv.reader(lines))) == trace.POD_COLUMNS
    assert "FGD" in (folder / "README.md").read_text() or "Fragmentation" in (folder / "README.md").read_text()
