"""A Python with Triton 3.9.0 and nothing else, as a pod has one: made by uv from the project's own lock, once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stack.paths import cache_root

_PROJECT = Path(__file__).parents[2]


def triton_python() -> Path:
    """Skips where it cannot be had, by name and reason."""
    uv = os.environ.get("UV") or shutil.which("uv") or str(_PROJECT / ".tools" / "bin" / "uv")
    place = cache_root() / "triton-3.9.0"
    command = [uv, "sync", "--quiet", "--locked", "--only-group", "triton", "--no-install-project"]
    try:
        subprocess.run(
            command, cwd=_PROJECT, env=os.environ | {"UV_PROJECT_ENVIRONMENT": str(place)}, check=True,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    except subprocess.CalledProcessError as failed:
        pytest.skip(f"Triton 3.9.0 cannot be had here: {failed.stderr.strip()[-300:]}")
    except (OSError, subprocess.TimeoutExpired) as failed:
        pytest.skip(f"Triton 3.9.0 cannot be had here: {failed}")
    return place / "bin" / "python"
