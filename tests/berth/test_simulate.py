"""`berth simulate` as a person runs it: on openb's format, on other files, and on broken ones."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from berth.cli import command_line
from berth.cli.simulate_command import parse_seeds
from berth.demo.trace import default_folder
from berth.simulate.run import inflated
from berth.simulate.trace import read_history, read_nodes, read_pods
from planning.filters import Shape
from planning.model import GPU_MODEL_LABEL, Resources
from planning.simulation import Arrival
from planning.typical import Kind
from stack.errors import StackError

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,32000,65536,4,T4\nb,32000,65536,4,H200\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
    "half,1000,1024,1,500,,LS\n"
    "two,1000,1024,2,1000,H200|A100,BE\n"
    "cpu,1000,1024,0,0,,BE\n"
)

TIMED = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,qos,creation_time,scheduled_time,deletion_time\n"
    "half,1000,1024,1,500,LS,0,5,605\n"
    "two,1000,1024,2,1000,BE,20,,320\n"
    "four,1000,1024,4,1000,BE,30,30.5,1e3\n"
    "cpu,1000,1024,0,0,LS,40,40,41\n"
)


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line(), ["simulate", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv.gz"
    nodes.write_text(NODES)
    pods.write_bytes(gzip.compress(PODS.encode()))
    return "--nodes", str(nodes), "--pods", str(pods)


def test_it_shows_a_table_and_writes_every_figure(files: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = simulate(*files, "--strategy", "fgd", "--strategy", "random", "--seeds", "1-3", "--json", str(out))
    assert code == 0, text
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["simulated"] and report["nodes"] == {"file": "nodes.csv", "count": 2, "gpus": 8}
    assert list(report["strategies"]) == ["fgd", "random"]
    found = report["strategies"]["fgd"]["unallocated_gpu_percent"]
    assert len(found["by_seed"]) == 3 and 0 <= found["mean"] < 100
    assert found["mean"] == pytest.approx(sum(found["by_seed"]) / 3, abs=1e-3)
    assert f"{found['mean']:.2f} ±" in text and "simulated" in text
    curve = report["strategies"]["fgd"]["allocated_gpu_percent_by_asked_percent"]
    assert curve == sorted(curve) and curve[-1] == pytest.approx(100 - found["mean"], abs=0.01)


def test_the_same_seed_gives_the_same_figures(files: tuple[str, ...], tmp_path: Path) -> None:
    told = []
    for name in ("a", "b"):
        assert simulate(*files, "--seeds", "7", "--json", str(tmp_path / name))[0] == 0
        strategies = json.loads((tmp_path / name).read_text())["strategies"]
        told.append({each: figures["unallocated_gpu_percent"] for each, figures in strategies.items()})
    assert told[0] == told[1] and len(told[0]) >= 6, "all installed strategies"


def test_on_openb_packing_leaves_less_than_spreading(tmp_path: Path) -> None:
    folder, out = default_folder(), tmp_path / "out.json"
    files = ("--nodes", str(folder / "nodes.csv"), "--pods", str(folder / "pods.csv.gz"))
    code, text = simulate(*files, "--strategy", "fgd", "--strategy", "leastLoaded", "--json", str(out))
    assert code == 0, text
    left = {
        name: figures["unallocated_gpu_percent"]["mean"]
        for name, figures in json.loads(out.read_text())["strategies"].items()
    }
    assert left["fgd"] < 0.7 * left["leastLoaded"]


@pytest.mark.parametrize(
    ("nodes", "pods", "told"),
    [
        (None, PODS, "does not exist"),
        ("", PODS, "has no column sn"),
        ("sn,cpu_milli,gpu\n", PODS, "has no column memory_mib"),
        ("sn,cpu_milli,memory_mib,gpu\n", PODS, "has no rows"),
        ("sn,cpu_milli,memory_mib,gpu\na,1,1,0\n", PODS, "no node with a GPU"),
        ("sn,cpu_milli,memory_mib,gpu\na,1,1,1\na,1,1,1\n", PODS, "nodes.csv, line 3: sn is 'a' again"),
        ("sn,cpu_milli,memory_mib,gpu\na,1,1,65\n", PODS, "line 2: gpu is 65, not from 0 to 64"),
        ("sn,cpu_milli,memory_mib,gpu\na,1,1,1,9\n", PODS, "line 2: it has more values than the 4 columns"),
        (NODES, PODS + "x,one,1,1,1000,,\n", "pods.csv, line 5: cpu_milli is 'one', not a whole number"),
        (NODES, PODS + "x,1\n", "line 5: num_gpu is '', not a whole number"),
        (NODES, PODS + "x,1,1,2,500,,\n", "line 5: gpu_milli is 500: a part of a GPU can be asked for of one only"),
        (NODES, PODS + "x,1,1,1,0,,\n", "line 5: gpu_milli is 0, not from 1 to 1000"),
        (NODES, "name,cpu_milli,memory_mib,num_gpu\nx,1,1,0\n", "no pod that asks for a GPU"),
        (NODES, "name,cpu_milli,memory_mib,num_gpu\n" + "x" * 200_000 + ",1,1,1\n", "line"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, nodes: str | None, pods: str, told: str) -> None:
    files = {"nodes": tmp_path / "nodes.csv", "pods": tmp_path / "pods.csv"}
    if nodes is not None:
        files["nodes"].write_text(nodes)
    files["pods"].write_text(pods)
    code, text = simulate("--nodes", str(files["nodes"]), "--pods", str(files["pods"]), "--strategy", "random")
    assert code == 1 and told in text.replace("\n", " "), text
    assert "Traceback" not in text


@given(st.binary(max_size=200), st.sampled_from(["nodes.csv", "pods.csv.gz"]))
def test_no_file_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    path = tmp_path_factory.mktemp("fuzzed") / name
    path.write_bytes(data)
    for read in (read_nodes, read_pods, read_history):
        with pytest.raises(StackError):
            read(path)


def test_a_damaged_file_and_one_that_cannot_be_written_are_told(files: tuple[str, ...], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.csv.gz"
    packed = bytearray(gzip.compress(NODES.encode() * 100))
    packed[20:40] = b"x" * 20
    damaged.write_bytes(packed)
    code, text = simulate("--nodes", str(damaged), *files[2:])
    assert code == 1 and "cannot be read" in text
    code, text = simulate(*files, "--strategy", "bestFit", "--json", str(tmp_path / "no" / "out[/x].json"))
    assert code == 1 and "cannot be written" in text and "bestFit" in text, "what was found is shown first"


def test_names_of_files_are_shown_as_they_are(tmp_path: Path, files: tuple[str, ...]) -> None:
    nodes = tmp_path / "n[a100].csv"
    nodes.write_text("\ufeff" + NODES, encoding="utf-8")
    code, text = simulate("--nodes", str(nodes), *files[2:], "--strategy", "bestFit")
    assert code == 0 and "n[a100].csv" in text


def test_it_ends_at_once_when_interrupted(tmp_path: Path) -> None:
    nodes, pods = tmp_path / "n.csv", tmp_path / "p.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu\n" + "".join(f"n{i},64000,65536,8\n" for i in range(3000)))
    pods.write_text("name,cpu_milli,memory_mib,num_gpu\nx,1,1,1\n")
    command = [sys.executable, "-m", "berth", "simulate", "--nodes", str(nodes), "--pods", str(pods)]
    process = subprocess.Popen(
        [*command, "--strategy", "random", "--seeds", "1-9"], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(15) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def timed(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "timed.csv").write_text(TIMED)
    return "--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "timed.csv")


def test_under_load_it_tells_who_waits(timed: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ("--strategy", "fgd", "--strategy", "leastLoaded", "--seeds", "1-3", "--load", "110")
    code, text = simulate(*timed, *asked, "--order", "fifo", "--order", "oracle", "--json", str(out))
    assert code == 0, text
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["simulated"] and report["load_percent"] == 110 and "arrivals" not in report
    assert report["pods"] == {"file": "timed.csv", "count": 4, "left_out": 0}
    assert list(report["strategies"]) == ["fgd", "leastLoaded"]
    for by_order in report["strategies"].values():
        assert list(by_order) == ["fifo", "oracle"]
        for told in by_order.values():
            waits = [told[f"{key}_wait_seconds"]["mean"] for key in ("median", "p90", "p99", "longest")]
            assert waits == sorted(waits) and len(told["mean_wait_seconds"]["by_seed"]) == 3
            assert set(told["tenants"]) == {"LS", "BE"} and set(told["gpus"]) == {"0", "2", "4", "part of one"}
            assert sum(each["pods"]["mean"] for each in told["tenants"].values()) == pytest.approx(1000, abs=1)
            held = told["allocated_gpu_percent_by_time_percent"]
            assert len(held) == 101 and all(0 <= each <= 100 for each in held)
            unallocated = told["unallocated_gpu_percent"]["mean"]
            assert unallocated == pytest.approx(100 - sum(held) / len(held), abs=5)
    fgd = report["strategies"]["fgd"]
    assert fgd["oracle"]["mean_wait_seconds"]["mean"] < fgd["fifo"]["mean_wait_seconds"]["mean"]
    assert "fgd, oracle" in text and "would keep 110 % of the GPUs busy" in text and "waiting pods over time" in text


def test_the_same_seed_gives_the_same_waits(timed: tuple[str, ...], tmp_path: Path) -> None:
    told = []
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        asked = (*timed, "--strategy", "random", "--load", "95", "--seeds", seed, "--order", "learned")
        assert simulate(*asked, "--json", str(tmp_path / name))[0] == 0
        found = json.loads((tmp_path / name).read_text())["strategies"]["random"]["learned"]
        told.append({key: each for key, each in found.items() if key != "placements_per_second"})
    assert told[0] == told[1] != told[2]


def test_little_load_waits_for_nothing_and_holds_what_was_asked(timed: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert simulate(*timed, "--strategy", "bestFit", "--load", "5", "--seeds", "1-4", "--json", str(out))[0] == 0
    told = json.loads(out.read_text())["strategies"]["bestFit"]["fifo"]
    assert told["median_wait_seconds"]["mean"] == told["never_placed_pods"]["mean"] == 0
    assert 100 - told["unallocated_gpu_percent"]["mean"] == pytest.approx(5, abs=1)


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        (PODS, "pods.csv has no column creation_time"),
        (TIMED.replace("20,,320", "20,,10"), "pods.csv, line 3: deletion_time is 10, before creation_time (20)"),
        (TIMED.replace("0,5,605", "0,700,605"), "line 2: deletion_time is 605, before scheduled_time (700)"),
        (TIMED.replace("30,30.5", "30,29"), "line 4: scheduled_time is 29, before creation_time (30)"),
        (TIMED.replace("0,5,605", "-1,5,605"), "line 2: creation_time is -1, not from 0 to 1e+12 seconds"),
        (TIMED.replace("0,5,605", "nan,5,605"), "line 2: creation_time is nan, not from 0"),
        (TIMED.replace("0,5,605", "0,5,"), "line 2: deletion_time is '', not a number of seconds"),
        (TIMED.replace("0,5,605", "0,soon,605"), "line 2: scheduled_time is 'soon', not a number of seconds"),
        (
            "name,cpu_milli,memory_mib,num_gpu,creation_time,deletion_time\na,1,1,5,0,9\nb,1,1,0,0,9\n",
            "that asks for a GPU fits on a node of",
        ),
    ],
)
def test_what_is_wrong_with_times_is_told_with_its_place(tmp_path: Path, pods: str, told: str) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(pods)
    files = ("--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv"))
    code, text = simulate(*files, "--strategy", "random", "--load", "90")
    assert code == 1 and told in text.replace("\n", " "), text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--load", "0"), "above 0"),
        (("--load", "1001"), "above 0"),
        (("--load", "nan"), "above 0"),
        (("--load", "much"), "valid number"),
        (("--load", "90", "--order", "luck"), "'luck' is none of fifo, learned, oracle"),
        (("--order", "fifo"), "without --load nobody waits"),
        (("--load", "90", "--arrivals", "1.3"), "that says how many pods arrive"),
    ],
)
def test_options_that_make_no_sense(timed: tuple[str, ...], asked: tuple[str, ...], told: str) -> None:
    code, text = simulate(*timed, *asked)
    assert code == 2 and told in " ".join(text.replace("│", " ").split()), text


def test_pods_that_fit_nowhere_are_left_out_and_counted(timed: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "timed.csv").write_text(TIMED + "huge,1000,1024,8,1000,BE,50,50,5000\n")
    code, text = simulate(*timed, "--strategy", "bestFit", "--load", "50")
    assert code == 0 and "1 more pods fit on no node" in text


def test_an_unknown_strategy_names_those_installed(files: tuple[str, ...]) -> None:
    code, text = simulate(*files, "--strategy", "bestGuess")
    assert code == 1 and "'bestGuess'" in text and "mostAllocated" in text


def test_the_columns_of_openb_are_read_as_they_are_meant(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text(NODES)
    (tmp_path / "p.csv").write_text(PODS)
    assert [node.labels[GPU_MODEL_LABEL] for node in read_nodes(tmp_path / "n.csv")] == ["T4", "H200"]
    half, two, cpu = read_pods(tmp_path / "p.csv")
    assert (half.gpu_milli, two.gpu_milli, cpu.gpu_milli) == (500, 2000, 0)
    assert (two.kind.models, half.kind.models) == (("A100", "H200"), ())


@pytest.mark.parametrize(("text", "seeds"), [("42-44", (42, 43, 44)), ("7", (7,)), ("1,2, 2-3", (1, 2, 3))])
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-99999999", "-1", "1,,2"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seeds(text)


def pod(name: str, gpus: int) -> Arrival:
    return Arrival(name, Shape(Resources(gpus)), Kind(gpus, 1000, 0))


def test_arrivals_are_drawn_again_until_they_ask_for_enough() -> None:
    queue = inflated([pod("1", 1), pod("2", 2)], 10_000, 1.3, seed=3)
    assert 13_000 <= sum(each.gpu_milli for each in queue) < 15_000
    assert {each.name for each in queue} == {"1", "2"}
    assert queue == inflated([pod("1", 1), pod("2", 2)], 10_000, 1.3, seed=3)
    with pytest.raises(ValueError, match="no pod asks for a GPU"):
        inflated([pod("cpu", 0)], 10_000, 1.3, seed=3)
