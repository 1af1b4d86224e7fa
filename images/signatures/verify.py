"""The door of this room: whose signatures lie beside an image, by the signers that policies name.

For the node's activity and `berth cache verify`. It asks the registry, gives what it got to a child process and returns
findings for `planning.caches.trust.judge`. Only what the registry's client raises passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from images.signatures import limits
from images.signatures.discovery import Repository, discover
from images.signatures.documents import shown
from images.signatures.request import Check, pack, unpack
from planning.caches.trust import Findings, Policy, RootKey, Signature

_HOME = Path(__file__).resolve().parents[2]


def checks_of(policies: Iterable[Policy]) -> list[Check]:
    """All signers of all policies."""
    return [Check(policy.name, signer) for policy in policies if policy.spec for signer in policy.spec.signers]


async def verify(
    repository: Repository,
    digest: str,
    policies: Sequence[Policy],
    roots: Mapping[RootKey, bytes],
    now: float,
    *,
    seed: int,
    good: Sequence[str] = (),
) -> Findings:
    """Looks at the signatures beside the image `digest`.

    `roots`: the trusted roots, as far as their ConfigMaps exist. `now`: seconds since 1970. `seed`: any number that was
    not known before; `good`: the places of signatures that satisfied a policy before (see `discovery`).
    """
    found = await discover(repository, digest, good, seed)
    if not found.candidates:
        return Findings((), found.more)
    checks = checks_of(policies)
    if len(checks) > limits.CHECKS:
        told = f"cannot be checked: the policies about this image name more than {limits.CHECKS} signers"
        return Findings(tuple(Signature(each.place, problem=told) for each in found.candidates), found.more)
    answer, trouble = await _ask(pack(digest, checks, roots, found.candidates, now))
    signatures = unpack(answer)
    left = found.candidates[len(signatures) :]
    signatures += [Signature(each.place, problem=f"was not looked at: {trouble}") for each in left]
    return Findings(tuple(each for each in signatures if each is not None), found.more, trouble if left else "")


async def _ask(request: bytes) -> tuple[bytes, str]:
    """What a child answers, as far as it got, and why it ended if that was too early."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "images.signatures.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=_HOME,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.stdin is not None  # noqa: S101 - all three were asked for
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    timer = asyncio.get_running_loop().call_later(limits.WALL_SECONDS, _end, process)
    try:
        _, answer, errors = await asyncio.gather(
            _feed(process.stdin, request), _at_most(process, process.stdout), _at_most(process, process.stderr)
        )
        code = await process.wait()
    finally:
        timer.cancel()
        _end(process)
    whole = answer[: answer.rfind(b"\n") + 1]
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return whole, f"the process that looks at signatures ended with {code}" + (f" ({shown(last)})" if last else "")


async def _at_most(process: asyncio.subprocess.Process, pipe: asyncio.StreamReader) -> bytes:
    """All that a child says. One that never stops is led astray, and is ended before what it says fills our memory."""
    try:
        said = await pipe.readexactly(limits.ANSWER)
    except asyncio.IncompleteReadError as end:
        return end.partial
    _end(process)
    return said


async def _feed(pipe: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(request)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
