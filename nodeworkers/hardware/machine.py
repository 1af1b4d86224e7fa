"""A machine that is not there, described in a YAML file: which cards it has and what is wrong with each, for nodes that
simulate their hardware and for tests. Each vendor's section has its own module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from crds.gpuworkload import CRDModel
from crds.refusals import explain_refusal
from nodeworkers.hardware.machine_nvidia import NvidiaMachine
from nodeworkers.hardware.machine_tenstorrent import TenstorrentMachine
from nodeworkers.hardware.provider import HardwareError

MOST_BYTES = 1024 * 1024  # of a file
_DEEPEST = 32  # levels of a file


class MachineError(HardwareError):
    """A file that describes no machine. The text is a sentence: the file, the line, what is wrong there."""


class Machine(CRDModel):
    """A simulated machine. A vendor that is left out has no cards in it."""

    tenstorrent: TenstorrentMachine = Field(default_factory=TenstorrentMachine)
    nvidia: NvidiaMachine = Field(default_factory=NvidiaMachine)


def read(path: Path) -> Machine:
    """The machine that a file describes. Raises MachineError."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(content) > MOST_BYTES:
        raise MachineError(f"{path} has more than {MOST_BYTES:,} bytes; no machine needs so many.")
    try:
        root, value = _parsed(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MachineError(f"{path} is no UTF-8 text (byte {error.start}).") from error
    except yaml.YAMLError as error:
        raise MachineError(f"{path}{_mark(error)} is no YAML that can be taken: {_problem(error)}.") from error
    except (ValueError, OverflowError) as error:  # what YAML takes for a date or a number, and Python does not
        raise MachineError(f"{path} has a value that cannot be read: {error}.") from error
    try:
        return Machine.model_validate({} if value is None else value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise MachineError(f"{path}, line {_line(root, first['loc'])}: {explain_refusal(error, 'machine')}.") from error


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """The file's only document, as nodes with their places and as a value. Raises YAMLError, ValueError."""
    # An alias could make a small file a huge machine, and depth could end the parser: neither is needed here.
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name), which is not taken here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                raise yaml.YAMLError(f"it is more than {_DEEPEST} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _line(node: yaml.Node | None, place: tuple[int | str, ...]) -> int:
    """The line of the deepest part of `place` that the file has; 1 is the first."""
    if node is None:
        return 1
    key: yaml.Node = node
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(name, value) for name, value in node.value if name.value == part]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = [(node.value[part], node.value[part])]
        else:
            break
        if not found:
            break
        key, node = found[-1]
    return key.start_mark.line + 1


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}," if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]
