"""What an image is called: registry, repository, tag and digest, as people write it in one line.

For whoever gets a reference from a person. What is one, and what is told of a text that is none, is decided in
`planning.references`, so that caches are refused at the door in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planning.references import (
    DOCKER_HUB,
    LIMIT,
    BadReference,
    check_repository,
    is_digest,
    parse_registry,
    parts,
)

__all__ = ["DOCKER_HUB", "LIMIT", "BadReference", "Reference", "check_repository", "is_digest", "parse_registry"]


@dataclass(frozen=True)
class Reference:
    """One image, or one state of it: with a digest it is that and nothing else, whatever the tag points to."""

    registry: str
    """Host, with a port where it is not 443 (`registry.example`, `localhost:5000`, `[::1]:5000`)."""
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises BadReference. Where neither tag nor digest is given the tag is `latest`, as everywhere."""
        return cls(*parts(text))

    @property
    def target(self) -> str:
        """What identifies it to a registry: the digest, if there is one."""
        return self.digest or self.tag

    def at(self, digest: str) -> Reference:
        """The same repository at a digest. The tag stays, for people."""
        return replace(self, digest=digest)

    def tagged(self, tag: str) -> Reference:
        """The same repository at a tag."""
        return replace(self, tag=tag, digest="")

    def __str__(self) -> str:
        return (
            f"{self.registry}/{self.repository}"
            + (f":{self.tag}" if self.tag else "")
            + (f"@{self.digest}" if self.digest else "")
        )
