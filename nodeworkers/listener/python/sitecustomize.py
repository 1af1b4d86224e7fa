"""Waits for Triton in every Python of a pod whose PYTHONPATH names this folder, to load the listener beside it then,
and gives way to the sitecustomize that Python would have found without it.

It runs at the start of each of them, and therefore does next to nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # of typing's, which every Python of the pod would load for it
if TYPE_CHECKING:
    from typing import Any


class _Waiting:
    """Stands on sys.meta_path until the module is imported in which Triton (3.4 and newer) keeps its listener."""

    def __init__(self) -> None:
        self.berths_folders: list[str] = []  # one for each mounted cache

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "triton.knobs":
            return None
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    self._follow(spec.loader)
                    return spec
        except Exception:  # noqa: S110 - whoever is asked next finds the same, or raises it
            pass
        return None

    def _follow(self, loader: Any) -> None:
        """Lets a loader load its module as ever, and then listens."""
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            sys.meta_path.remove(self)
            run(module)
            try:
                self._listen(module)
            except Exception:  # noqa: S110 - whatever is wrong here is none of the application's business
                pass

        loader.exec_module = exec_module

    def _listen(self, knobs: Any) -> None:
        from importlib.util import module_from_spec, spec_from_file_location

        name = "berth_triton_listener"
        spec = spec_from_file_location(name, os.path.join(self.berths_folders[0], name + ".py"))
        if spec is not None and spec.loader is not None:
            sys.modules[name] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
            module.listen(knobs, [os.path.dirname(os.path.dirname(each)) for each in self.berths_folders])


def _wait(here: str) -> None:
    waiting = next((each for each in sys.meta_path if hasattr(each, "berths_folders")), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    if here not in waiting.berths_folders:
        waiting.berths_folders.append(here)


def _give_way(here: str) -> None:
    """Imports the next sitecustomize on the path under that name. It raises what it would raise without us."""
    path = [os.path.abspath(each) for each in sys.path]
    if here not in path or "sitecustomize" not in sys.modules:
        return
    place = path.index(here)
    removed, ours = sys.path.pop(place), sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        sys.modules["sitecustomize"] = ours
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path.insert(place, removed)


_wait(os.path.dirname(os.path.realpath(__file__)))
_give_way(os.path.dirname(os.path.abspath(__file__)))
