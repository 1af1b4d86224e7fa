"""What a process gets that outlives `berth node`: nothing of its environment but what programs need to be found and to
find their libraries. Credentials stay here.
"""

from __future__ import annotations

import os

_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_")


def outliving() -> dict[str, str]:
    """Its environment."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
