"""The CSI driver as a process of its own, which a test may kill: `python -m tests.nodeworkers.csi_process …`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path

from nodeworkers.csi.driver import Driver, Places
from nodeworkers.ledger import Ledger
from tests.nodeworkers.csi_rig import UPPER_BYTES, Store


async def main(folder: Path, kubelet_root: Path, node_name: str) -> None:
    store = Store.__new__(Store)
    store.folder = folder / "store"
    ledger = Ledger(folder)
    driver = Driver(Places(kubelet_root, folder), node_name, ledger, store, UPPER_BYTES)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await driver.start()
    print("serving", flush=True)
    watching = asyncio.create_task(driver.watch())
    await ended.wait()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    await driver.stop()
    ledger.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
