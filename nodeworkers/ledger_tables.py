"""The tables of a node's ledger, as one feature after the other added them."""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, str], ...] = (
    (
        "kernel caches",
        """
        CREATE TABLE caches (
          uid TEXT PRIMARY KEY,
          kind TEXT NOT NULL CHECK (kind IN ('TritonKernelCache', 'TritonKernelCacheCluster')),
          namespace TEXT NOT NULL,
          name TEXT NOT NULL,
          state TEXT NOT NULL CHECK (state IN ('Pending', 'Ready', 'Failed', 'Removing')),
          generation INTEGER NOT NULL,
          digest TEXT NOT NULL,
          mount_path TEXT NOT NULL,
          size_bytes INTEGER NOT NULL,
          compatible INTEGER CHECK (compatible IN (0, 1)),
          reason TEXT NOT NULL,
          last_known_good TEXT NOT NULL,
          labels TEXT NOT NULL CHECK (json_valid(labels)),
          UNIQUE (name, kind, namespace)
        ) STRICT;
        CREATE TABLE mounts (
          volume_id TEXT PRIMARY KEY,
          target_path TEXT NOT NULL,
          pod_uid TEXT NOT NULL,
          pod_namespace TEXT NOT NULL,
          pod_name TEXT NOT NULL,
          cache_uid TEXT NOT NULL,
          cache_kind TEXT NOT NULL,
          cache_name TEXT NOT NULL,
          digest TEXT NOT NULL,
          mount_path TEXT NOT NULL,
          size_bytes INTEGER NOT NULL,
          upper TEXT NOT NULL,
          size_cap INTEGER NOT NULL,
          published_at REAL
        ) STRICT;
        """,
    ),
    (
        "orders",
        """
        ALTER TABLE caches ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE caches ADD COLUMN goal TEXT NOT NULL DEFAULT '';
        ALTER TABLE caches ADD COLUMN signatures TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(signatures));
        """,
    ),
    (
        "what pods reported of their caches",
        # A volume's row is what its pod has told so far; when the volume goes it is added to that of all that went,
        # whose volume_id is '', and a cache takes its rows with it.
        """
        CREATE TABLE seen (
          cache_uid TEXT NOT NULL,
          digest TEXT NOT NULL,
          volume_id TEXT NOT NULL,
          hits INTEGER NOT NULL,
          misses INTEGER NOT NULL,
          compile_seconds REAL NOT NULL,
          PRIMARY KEY (cache_uid, digest, volume_id)
        ) STRICT;
        CREATE INDEX seen_by_volume ON seen (volume_id);
        CREATE TRIGGER seen_outlives_the_volume AFTER DELETE ON mounts BEGIN
          INSERT INTO seen
            SELECT cache_uid, digest, '', hits, misses, compile_seconds FROM seen
            WHERE volume_id = OLD.volume_id AND cache_uid IN (SELECT uid FROM caches)
            ON CONFLICT DO UPDATE SET hits = hits + excluded.hits, misses = misses + excluded.misses,
              compile_seconds = compile_seconds + excluded.compile_seconds;
          DELETE FROM seen WHERE volume_id = OLD.volume_id;
        END;
        CREATE TRIGGER seen_goes_with_the_cache AFTER DELETE ON caches BEGIN
          DELETE FROM seen WHERE cache_uid = OLD.uid AND volume_id = '';
        END;
        """,
    ),
    (
        "devices: see nodeworkers/devices/records.py",
        """
        CREATE TABLE cards (
          id TEXT PRIMARY KEY,
          card TEXT NOT NULL,
          health TEXT NOT NULL,
          seen REAL NOT NULL
        ) STRICT;
        CREATE TABLE allocations (
          number INTEGER PRIMARY KEY,
          resource TEXT NOT NULL,
          devices TEXT NOT NULL,
          claim TEXT NOT NULL,
          given REAL NOT NULL,
          injection TEXT NOT NULL
        ) STRICT;
        """,
    ),
    (
        "seats: see nodeworkers/seats/slots.py",
        # `seat` has the slot, `next` is to have it once it is clear; `runs` are those of the workflow that were heard
        # of, the newest last.
        """
        CREATE TABLE seat_groups (
          name TEXT PRIMARY KEY,
          epoch INTEGER NOT NULL,
          runs TEXT NOT NULL CHECK (json_valid(runs)),
          phase TEXT NOT NULL,
          seat TEXT NOT NULL,
          next TEXT NOT NULL,
          reason TEXT NOT NULL,
          since REAL NOT NULL,
          switches INTEGER NOT NULL
        ) STRICT;
        """,
    ),
    (
        "seats: see nodeworkers/seats/records.py",
        """
        CREATE TABLE seats (
          id TEXT PRIMARY KEY,
          port INTEGER NOT NULL UNIQUE,
          holder TEXT NOT NULL,
          known TEXT NOT NULL CHECK (json_valid(known))
        ) STRICT;
        """,
    ),
)
"""What each feature added, in the order of `PRAGMA user_version`. Never edit one: append."""
