"""Writes the messages of proto/ as Python: `python -m nodeworkers.rpc.generate [--check]`, for `make proto` and CI."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "proto"
TARGET = Path(__file__).resolve().parent


def generate(folder: Path) -> list[Path]:
    """Writes a module and its types into `folder` for each .proto file."""
    from grpc_tools import protoc  # a development dependency

    sources = sorted(SOURCE.glob("*.proto"))
    includes = [f"-I{SOURCE}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
    if protoc.main(["protoc", *includes, *outputs, *(str(source) for source in sources)]) != 0:
        raise SystemExit("protoc failed: its own message is above")
    return [folder / f"{source.stem}_pb2{suffix}" for source in sources for suffix in (".py", ".pyi")]


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with --check tell by the exit status whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m nodeworkers.rpc.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check, stale = parser.parse_args(arguments).check, False
    if not check:
        for path in generate(TARGET):
            print(path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for path in generate(Path(folder)):
            target = TARGET / path.name
            if not target.exists() or target.read_bytes() != path.read_bytes():
                print(f"{target} is out of date: run `make proto`", file=sys.stderr)
                stale = True
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
