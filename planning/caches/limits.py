"""How large anything may be that a registry or an image hands us: whoever reads such bytes counts them against these.

Chosen above what real caches have (2 GB for a large model, some thousand kernels) and below what harms a node.
"""

from __future__ import annotations

KIB, MIB, GIB = 1024, 1024**2, 1024**3

MANIFEST_BYTES = 4 * MIB  # of an image or an index: what registries themselves accept
CONFIG_BYTES = 4 * MIB
SUMMARY_BYTES = 256 * KIB  # one label
INDEX_ENTRIES = 256
LAYERS = 16
LAYER_BYTES = 8 * GIB  # one layer, compressed

EXTRACTED_BYTES = 32 * GIB  # all files of an image together
FILE_BYTES = 4 * GIB
ENTRIES = 200_000  # files and folders
PATH_BYTES = 1024
NAME_BYTES = 255  # one part of a path: what file systems hold
DEPTH = 16
RATIO = 200  # extracted to compressed, once RATIO_FREE_BYTES have come out
RATIO_FREE_BYTES = 16 * MIB
EXTRACTION_SECONDS = 30 * 60

JSON_BYTES = 1 * MIB  # one JSON file within a cache
