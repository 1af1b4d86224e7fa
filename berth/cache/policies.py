"""KernelCachePolicies from files and keys, for `berth cache verify`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from crds.kernelcache import API_VERSION
from crds.kernelcachepolicy import KIND, KernelCachePolicySpec
from planning.caches.trust import Policy
from stack.errors import StackError


def from_files(files: Iterable[Path]) -> list[Policy]:
    """The policies in YAML files, those that cannot be read with the reason. Raises StackError and OSError."""
    found: list[Policy] = []
    for file in files:
        try:
            documents = [each for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each is not None]
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as wrong:
            raise StackError(f"{file} is no YAML: {wrong}") from None
        found += [_policy(file, document) for document in documents]
    return found


def of_keys(keys: Iterable[Path]) -> list[Policy]:
    """A policy that each of the keys satisfies, about all images. Raises StackError and OSError."""
    signers = [{"name": key.name, "key": key.read_text(encoding="utf-8", errors="replace")} for key in keys]
    if not signers:
        return []
    spec, problem = KernelCachePolicySpec.parse({"images": ["**"], "signers": signers})
    if spec is None:
        raise StackError(f"The keys cannot be those of signers: {problem}.")
    return [Policy("of --key", spec)]


def _policy(file: Path, document: Any) -> Policy:
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != KIND or document.get("apiVersion") != API_VERSION:
        raise StackError(f"{file} has something that is no {KIND} of {API_VERSION}.", "Give files with policies only.")
    metadata = document.get("metadata")
    name = str(metadata.get("name")) if isinstance(metadata, dict) else "without a name"
    spec, problem = KernelCachePolicySpec.parse(document.get("spec"))
    return Policy(name, spec, problem)
