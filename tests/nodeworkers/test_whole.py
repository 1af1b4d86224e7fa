"""From a folder of kernels to pods that find them, by real parts alone: an image that `berth cache build` made, a
real registry, the real cosign, a real kubelet, berth's own processes, and Triton 3.9.0 on the pod's mount.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import CAPTURED, needs_mounts
from tests.nodeworkers.pods import NODE, pod
from tests.nodeworkers.triton_python import triton_python
from tests.nodeworkers.whole import DATA, KERNELS, NODE_STATUS, Cluster, whole

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with whole(tmp_path_factory.mktemp) as made:
        yield made


def hits(cluster: Cluster, pod_name: str, code: str) -> list[bool]:
    """What Triton's own listener tells when `code` runs as the pod's user where the pod has its cache mounted."""
    script = cluster.folder / "kernels.py"
    script.write_text(code)
    # A folder tree of its own: the host's has no /home/app, and gets none. Reading is free, for the Python may lie
    # where the pod's user could not go; writing is not.
    may_read = "--inh-caps +dac_read_search --ambient-caps +dac_read_search"
    enter = (
        "mount -t tmpfs none /home && mkdir -p /home/app/.triton/cache && "
        f'cp {script} /home/app/kernels.py && mount --bind "$1" {CAPTURED} && cd /home/app && shift && '
        f'exec setpriv --reuid 1000 --regid 1000 --groups 2000 {may_read} "$@"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", enter, "sh", str(cluster.mount(pod_name)), str(triton_python()), "kernels.py"],
        env={
            "PATH": os.environ["PATH"], "HOME": "/home/app", "TRITON_CACHE_DIR": CAPTURED,
            "TRITON_STORE_BINARY_ONLY": "1", "TRITON_DISABLE_LINE_INFO": "1",
            "PYTHONPATH": f"{CAPTURED}/.berth/python", "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(ast.literal_eval(done.stdout.strip()))


def code() -> str:
    """What the kernels of tests/images/data were compiled from."""
    found = re.search(r"```python\n(.*?)```", (DATA / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_from_a_folder_of_kernels_to_pods_that_find_them(cluster: Cluster) -> None:
    image = cluster.push("llama")
    runtime = {"triton": "3.9.0", "ptxas": "13.4.59", "environment": {"TRITON_DISABLE_LINE_INFO": "1"}}
    cluster.apply(cluster.cache("llama", image, runtime=runtime))
    told = cluster.until_condition("llama", "Ready", "True", "Ready")
    assert "1 node" in told
    assert cluster.condition("tritonkernelcache", "llama", "Verified")[0] == "True"
    status = cluster.get(NODE_STATUS, f"llama.{NODE}")["status"]
    assert status["gpuType"] and status["simulated"] is True and status["mountPath"] == CAPTURED
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Compatible"][0] == conditions["Verified"][0] == "True"
    assert conditions["HitPredicted"] == ("True", "RuntimeMatches")

    cluster.apply(pod("first", "llama"), pod("second", "llama"))
    cluster.running("first")
    cluster.running("second")
    cluster.until("two pods are counted", lambda: cluster.pods("llama") == 2)
    only_cuda = code().replace(' GPUTarget("hip", "gfx942", 64)', "")
    assert only_cuda != code()
    assert hits(cluster, "first", only_cuda) == [True, True], "every kernel of the image for this GPU is found"
    cluster.until_predicted("llama", "True", "ListenerSawHits")
    # What the image does not have (another GPU's kernels) is compiled into the pod's own layer, and found there then.
    assert hits(cluster, "first", code()) == [True, True, False, False]
    assert hits(cluster, "first", code()) == [True, True, True, True]
    listing = cluster.inside("second", f"ls {CAPTURED}").split()
    assert len([name for name in listing if len(name) == 52]) == 2, "another pod sees nothing of it"
    assert hits(cluster, "second", only_cuda) == [True, True]
    cluster.until_predicted("llama", "False", "ListenerSawMisses")


def test_what_is_refused_says_why_and_takes_nothing_away(cluster: Cluster) -> None:
    cluster.apply(cluster.cache("guarded", cluster.push("guarded")))
    cluster.until_condition("guarded", "Ready", "True", "Ready")
    served = cluster.served("guarded")
    cluster.apply(pod("holder", "guarded"), pod("stranger", "guarded", namespace="team-b"))
    cluster.running("holder")
    cluster.until("a pod of another namespace is told", lambda: "not known" in cluster.events("stranger", "team-b"))

    cluster.apply(cluster.cache("guarded", cluster.push("unsigned", sign=False)))
    told = cluster.until_condition("guarded", "Error", "True", "RolledBack")
    assert "NotSigned" in told or "has no signature" in told
    cluster.until_condition("guarded", "Ready", "True", "Ready")
    assert cluster.served("guarded") == served
    cluster.apply(pod("later", "guarded"))
    cluster.running("later")
    assert len(cluster.inside("holder", f"ls {CAPTURED}").split()) == 2

    only_amd = cluster.folder / "only-amd"
    shutil.copytree(KERNELS, only_amd)
    for metadata in only_amd.glob("*/*.json"):
        if not metadata.name.startswith("__grp__") and '"cuda"' in metadata.read_text():
            shutil.rmtree(metadata.parent)
    cluster.apply(cluster.cache("amd", cluster.push("amd", only_amd)), pod("on-nvidia", "amd"))
    told = cluster.until_condition("amd", "Ready", "False", "Incompatible")
    assert "gfx942" in told
    cluster.until("its pod is told", lambda: "does not fit the GPUs" in cluster.events("on-nvidia"))


def test_deletion_waits_for_the_pod_that_has_it_mounted(cluster: Cluster) -> None:
    cluster.apply(cluster.cache("short", cluster.push("short")), pod("user", "short"))
    cluster.running("user")
    cluster.until("the pod is counted", lambda: cluster.pods("short") == 1)
    cluster.stack.kubectl("-n", "team-a", "delete", "tritonkernelcache", "short", "--wait=false")
    told = cluster.until_condition("short", "Ready", "False", "InUse")
    assert "1 pod" in told and NODE in told
    assert len(cluster.inside("user", f"ls {CAPTURED}").split()) == 2
    cluster.stack.kubectl("-n", "team-a", "delete", "pod", "user")
    cluster.until("the cache is gone", lambda: not cluster.get("tritonkernelcache", "short"))
    cluster.until("so is what the node said", lambda: not cluster.get(NODE_STATUS, f"short.{NODE}"))
