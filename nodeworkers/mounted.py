"""The volumes that a node's ledger has on record, for a program beside the one that writes it: the file is opened to
read only, without the writer's lock, and nothing in it is repaired or brought up to date.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nodeworkers.ledger import FILE, LedgerError, Mount
from nodeworkers.ledger_tables import MIGRATIONS

_WAIT = 5.0  # seconds for a writer that has the file for itself
_mounts: TypeAdapter[list[Mount]] = TypeAdapter(list[Mount])


def mounted(folder: Path) -> list[Mount]:
    """The volumes that are mounted, by pod and id, of the ledger in `folder`. Raises LedgerError where there is none
    that this berth can read.
    """
    path = folder / FILE
    if not path.is_file():
        raise LedgerError(
            f"There is no ledger in {folder}: name the folder that berth node has as --root, on the node itself and as "
            "root."
        )
    names = ", ".join(field.name for field in fields(Mount))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_WAIT)) as db:
            db.row_factory = sqlite3.Row
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version > len(MIGRATIONS):
                raise LedgerError(
                    f"The ledger {path} was written by a newer berth (schema {version}; this one knows "
                    f"{len(MIGRATIONS)}). Use the berth that runs on this node."
                )
            query = f"SELECT {names} FROM mounts WHERE published_at IS NOT NULL"  # noqa: S608  # names of our own
            rows = [dict(row) for row in db.execute(query).fetchall()]
        found = _mounts.validate_python(rows)
    except (sqlite3.Error, ValidationError) as error:
        raise LedgerError(
            f"The ledger {path} cannot be read: {str(error).splitlines()[0]}. It must be the one that berth node "
            "writes, and you must be root."
        ) from error
    return sorted(found, key=lambda mount: (mount.pod_namespace, mount.pod_name, mount.volume_id))
