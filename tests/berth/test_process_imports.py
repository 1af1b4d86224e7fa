"""The processes that run for weeks on every cluster load nothing of the embedded stack, and no cryptography
where nothing is verified.
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
print(sorted(set({unwanted!r}) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("controller", ("stack", "berth.demo", "cryptography")),
        ("worker", ("stack", "berth.demo", "cryptography")),
        ("node", ("stack", "berth.demo")),
    ],
)
def test_a_process_loads_what_it_needs(name: str, unwanted: tuple[str, ...]) -> None:
    done = subprocess.run(  # our own interpreter and script
        [sys.executable, "-c", SCRIPT.format(name=name, unwanted=unwanted)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "--health-port" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
