"""The process that reads what strangers wrote: X.509, ASN.1, JSON and the patterns of policies.

`python -m images.signatures.child`, started by `verify` for one image: a request on standard input, the answer on
standard output. It reads the signers, which come from people who are trusted, then gives up rights, network and most of
its limits, and only then opens what lies beside the image.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

from crds.kernelcachepolicy import Signer
from images.signatures import limits
from images.signatures.envelopes import Candidate
from images.signatures.request import Check
from images.signatures.verification import Verification

# What cryptography loads when it first checks something; then files can no longer be opened.
_LATE = (
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.utf_16_be",
    "encodings.utf_32_be",
)
_NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWNET = 0x40000000


def run(request: Mapping[str, Any], write: Callable[[str], object]) -> None:
    """Answers with a line for every candidate, each as soon as it is known."""
    verification = Verification(
        [Check(policy, Signer.model_validate(signer)) for policy, signer in request["checks"]],
        {(name, key): base64.b64decode(raw) for name, key, raw in request["roots"]},
        request["now"],
    )
    for module in _LATE:
        import_module(module)
    give_up()
    for each in request["candidates"]:
        candidate = Candidate(
            each["place"], each["form"], base64.b64decode(each["content"]), each["annotations"], each["problem"]
        )
        found = verification.examine(candidate, request["digest"])
        write(json.dumps(None if found is None else {**asdict(found), "satisfies": sorted(found.satisfies)}) + "\n")


def give_up() -> None:
    """Rights, network, files, processes: nothing of that is needed to look at bytes. What is not ours to give stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    for what, most in (
        (resource.RLIMIT_CPU, limits.CPU_SECONDS),
        (resource.RLIMIT_AS, limits.MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(what, (most, most))
    libc.unshare(_CLONE_NEWNET)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # here, for a change of the user undoes it
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def main() -> None:
    with suppress(BrokenPipeError):  # whoever asked is gone
        run(json.load(sys.stdin.buffer), partial(print, end="", flush=True))


if __name__ == "__main__":
    main()
