"""How much of what a registry says about signatures is read at all, and how long it may be thought about."""

from __future__ import annotations

MANIFEST = 4 * 1024 * 1024  # bytes, as everywhere in images/
CANDIDATES = 32  # signatures of one image that are looked at
BUNDLE = 256 * 1024  # bytes; cosign's have 4 to 12 KiB
PAYLOAD = 64 * 1024  # bytes of what a legacy signature is over; cosign's have 300
ANNOTATION = 64 * 1024  # bytes of one annotation of a legacy signature
DEPTH = 32  # levels of JSON; bundles have about nine
CERTIFICATES = 8  # of one signature
TIMESTAMPS = 8  # of one signature
NAMES = 32  # subject alternative names of one certificate
NAME = 512  # characters of one; policies cannot ask for a longer one
TRUSTED_ROOT = 1024 * 1024  # bytes: what a ConfigMap holds
CHECKS = 256  # signers of all policies together

PATTERN_SECONDS = 0.25  # for one pattern on one name
ANSWER = 4 * 1024 * 1024  # bytes of what is told of all signatures of an image: a problem has hundreds of characters
CPU_SECONDS = 30  # for all signatures of an image
WALL_SECONDS = 60.0
MEMORY = 1024 * 1024 * 1024  # bytes of address space
