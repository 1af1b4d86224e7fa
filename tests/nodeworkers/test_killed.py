"""SIGKILL at every step of a publish, of an unpublish, and of making a spare layer: the next start puts it in order,
and the kubelet's next call works. The process that dies is real; the steps are the system calls and records that change
anything.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodeworkers.csi_rig import KERNEL, Rig, needs_mounts, request, rig_in

pytestmark = [*needs_mounts, pytest.mark.faults]

DOOMED = """
import os, signal, sys
from pathlib import Path
from nodeworkers import ledger
from nodeworkers.csi import mounts, uppers
from tests.nodeworkers.csi_rig import Rig, Store, request

folder, act, dies_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
Store.__init__ = lambda self, folder: setattr(self, "folder", folder)
rig = Rig(folder / "kubelet", folder / "berth", Store(folder / "berth" / "store"))
volumes = rig.open()
if act == "publish with a spare":
    volumes.uppers.add_spare()
steps = 0

def step(function):
    def counted(*arguments, **named):
        global steps
        for moment in ("before", "after"):
            if moment == "after":
                result = function(*arguments, **named)
            steps += 1
            if steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    return counted

mounts.mount, mounts.unmount = step(mounts.mount), step(mounts.unmount)
uppers._copied, uppers._attached = step(uppers._copied), step(uppers._attached)
ledger.Ledger.put_mount, ledger.Ledger.remove_mount = step(ledger.Ledger.put_mount), step(ledger.Ledger.remove_mount)
for name in ("mkdir", "rmdir", "unlink", "chmod", "rename"):
    setattr(os, name, step(getattr(os, name)))
if act.startswith("publish"):
    volumes.publish("csi-1", rig.target(), request(), 2000)
elif act == "spare":
    volumes.uppers.add_spare()
else:
    volumes.unpublish("csi-1", rig.target())
"""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rig_in(tmp_path) as made:
        made.target()
        yield made


def killed(rig: Rig, act: str, step: int) -> bool:
    """Whether the process died before it was done."""
    done = subprocess.run(
        [sys.executable, "-c", DOOMED, str(rig.folder.parent), act, str(step)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


@pytest.mark.parametrize("act", ["publish", "publish with a spare", "spare", "unpublish"])
def test_killed_at_any_step_nothing_is_left_and_the_next_call_works(rig: Rig, act: str) -> None:
    target = rig.target()
    died = 0
    for step in range(1, 200):
        if act == "unpublish":
            volumes = rig.open()
            volumes.sweep()
            volumes.publish("csi-1", target, request(), None)
            volumes.ledger.close()
        died += killed(rig, act, step)
        over = died < step
        volumes = rig.open()
        volumes.sweep()
        assert volumes.sweep() == [], f"step {step}: one sweep was not enough"
        mounted = [point for point in rig.mounted() if point.place == target]
        assert len(mounted) == volumes.ledger.volumes() <= 1, f"step {step}"
        if mounted:
            record = volumes.ledger.mount("csi-1")
            assert record is not None and record.published_at is not None
        if not mounted or step % 2:
            volumes.publish("csi-1", target, request(), None)
            assert Path(target, KERNEL, "add.cubin").read_bytes() == b"machine code"
        volumes.unpublish("csi-1", target)
        assert rig.left() == [], f"step {step}"
        assert volumes.ledger.mounts() == []
        volumes.ledger.close()
        if over:
            break
    assert died > 12, "the steps were not seen"
