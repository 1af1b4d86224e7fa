"""Which claims are prepared on this node, and what their containers get: a file of each, from which a repeated call is
answered, and a CDI spec of each that needs one of its own.

A file is written whole or not at all and outlives a reboot, as the kubelet's own record of prepared claims does; CDI
specs lie in /var/run and do not, so they are written anew when the process starts. Each carries the whole claim, so
that it is known which devices containers have also where our own folder was lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from planning.devices.claims import CDI_KIND
from planning.devices.offers import Injection
from planning.devices.slices import DRIVER

CDI_VERSION: Final = "0.6.0"  # devices whose names begin with a digit, hostPath, annotations
_RECORD: Final = f"{DRIVER}/prepared"  # the annotation of a spec that has its claim

_SPECS = f"{CDI_KIND.replace('/', '-')}_*.json"
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_LIMIT = 4 * 1024 * 1024  # bytes of one file
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """One device of a claim, as the kubelet is told of it."""

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...] = ()
    share: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Devices that were handed out in one piece, by their ids, and what containers get with them."""

    resource: str
    ids: tuple[str, ...]
    injection: Injection


@dataclass(frozen=True, slots=True)
class Prepared:
    """A claim whose devices are handed out. `edits` by name of the CDI device in its own spec (CDI containerEdits);
    `parts` without what is only looked at.
    """

    uid: str
    namespace: str
    name: str
    devices: tuple[Given, ...]
    edits: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()


_prepared: TypeAdapter[Prepared] = TypeAdapter(Prepared)


class PreparedClaims:
    """The prepared claims of one driver on this node, of which this process is the only writer. Its methods but `get`
    block: they are disk work, and raise OSError.
    """

    def __init__(self, folder: Path, cdi: Path) -> None:
        """`folder` is ours alone and lasts; `cdi` is where the container runtime looks for specs (/var/run/cdi)."""
        self._folder, self._cdi = folder, cdi
        self._claims: dict[str, Prepared] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def open(self) -> None:
        """Reads what the last run left and writes what is missing, of files and of CDI specs; specs of nobody go."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in sorted(self._folder.glob("*.json")):
            if _read(file) is None:
                _log.warning("%s cannot be read: its claim is prepared anew when the kubelet asks for it.", file)
                file.replace(file.with_suffix(".damaged"))
        for claim in found(self._folder, self._cdi):
            if (self._folder / f"{claim.uid}.json").exists():
                self._specify(claim)
                self._claims[claim.uid] = claim
            else:
                told = f"{claim.namespace}/{claim.name}"
                _log.warning("The record of the claim %s was lost, and is restored from its CDI spec.", told)
                self.put(claim)
        for file in self._cdi.glob(_SPECS):
            known = self._claims.get(_uid(file))
            if known is None or not known.edits:
                file.unlink(missing_ok=True)

    def get(self, uid: str) -> Prepared | None:
        """The claim of this UID, if it is prepared."""
        return self._claims.get(uid)

    def put(self, claim: Prepared) -> None:
        """Writes its CDI spec, then itself. ValueError if its UID is none."""
        if not _UID.fullmatch(claim.uid):
            raise ValueError(f"{claim.uid!r} is not a UID of a ResourceClaim.")
        self._specify(claim)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self._folder / f"{claim.uid}.json", asdict(claim), 0o600)
        self._claims[claim.uid] = claim

    def refresh(self, claim: Prepared) -> None:
        """Makes sure that its CDI spec is there, whoever took it away."""
        if claim.edits and not self._spec(claim.uid).exists():
            self._specify(claim)

    def remove(self, uid: str) -> None:
        """Forgets a claim, with its CDI spec; nothing if there is none."""
        if _UID.fullmatch(uid):
            self._spec(uid).unlink(missing_ok=True)
            (self._folder / f"{uid}.json").unlink(missing_ok=True)
            self._claims.pop(uid, None)

    def _spec(self, uid: str) -> Path:
        return self._cdi / _SPECS.replace("*", uid)

    def _specify(self, claim: Prepared) -> None:
        if not claim.edits:
            return
        devices = [{"name": name, "containerEdits": edits} for name, edits in claim.edits.items()]
        self._cdi.mkdir(parents=True, exist_ok=True, mode=0o755)
        record = {_RECORD: _prepared.dump_json(claim).decode()}
        spec = {"cdiVersion": CDI_VERSION, "kind": CDI_KIND, "annotations": record, "devices": devices}
        _write(self._spec(claim.uid), spec, 0o644)


def found(folder: Path, cdi: Path) -> list[Prepared]:
    """The claims that were prepared when the last run ended: of its files, and of CDI specs whose file is lost. Changes
    nothing, and never raises; what cannot be read is left out.
    """
    claims = {_uid(file): claim for file in sorted(cdi.glob(_SPECS)) if (claim := _read(file, _recorded)) is not None}
    claims |= {file.stem: claim for file in sorted(folder.glob("*.json")) if (claim := _read(file)) is not None}
    return list(claims.values())


def edits(injection: Injection) -> dict[str, Any]:
    """The CDI containerEdits that do what an injection says beside its own CDI names; {} if that is nothing.

    Annotations are left out: through DRA a container gets none.
    """
    result: dict[str, Any] = {}
    if injection.env:
        result["env"] = [f"{name}={value}" for name, value in sorted(injection.env.items())]
    if injection.nodes:
        result["deviceNodes"] = [
            {"path": node.container, "hostPath": node.host, "permissions": node.permissions} for node in injection.nodes
        ]
    if injection.mounts:
        result["mounts"] = [
            {
                "hostPath": mount.host,
                "containerPath": mount.container,
                "options": ["rbind", "nosuid", "nodev", "ro" if mount.read_only else "rw"],
            }
            for mount in injection.mounts
        ]
    return result


def _uid(file: Path) -> str:
    return file.stem.rpartition("_")[2]


def _recorded(spec: bytes) -> Prepared:
    """The claim of a CDI spec."""
    return _prepared.validate_json(json.loads(spec)["annotations"][_RECORD])


def _read(file: Path, understood: Callable[[bytes], Prepared] = _prepared.validate_json) -> Prepared | None:
    """None if it is damaged or another's."""
    try:
        if file.stat().st_size > _LIMIT:
            return None
        claim = understood(file.read_bytes())
    except (OSError, ValidationError, ValueError, TypeError, LookupError):
        return None
    return claim if claim.uid == _uid(file) and _UID.fullmatch(claim.uid) else None


def _write(path: Path, body: Mapping[str, Any], mode: int) -> None:
    """Whole or not at all, also after a power cut."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(json.dumps(body, sort_keys=True, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
