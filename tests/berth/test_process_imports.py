"""The processes that run for weeks on every cluster load neither the embedded stack nor cryptography: what signatures
there are to check, a child checks.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.argv = ["berth", {name!r}, "--help"]
from berth.cli import main
try:
    main()
except SystemExit:
    pass
import berth.{name}_process
print(sorted({{"stack", "cryptography", "berth.demo"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", ["controller", "worker", "node"])
def test_a_process_loads_what_it_needs(name: str) -> None:
    done = subprocess.run(  # our own interpreter and script
        [sys.executable, "-c", SCRIPT.format(name=name)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--health-port" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
