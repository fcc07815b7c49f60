"""Stands in for Intel's `habana_frameworks`, so that optimum-habana's model classes run on a CPU.

Any submodule can be imported, and any name in it is a `Hollow`. What the engine itself calls is real: `mark_step` and
`wrap_in_hpu_graph` work as on a Gaudi, as far as a CPU can show it, and count what they see. See `observed`.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from habana_frameworks import observed


class Hollow:
    """Any function, class or version of the missing library: it can be called, compared and used as a decorator."""

    def __call__(self, *args: object, **kwargs: object) -> "Hollow":
        return self

    def __getattr__(self, name: str) -> "Hollow":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hollow)

    __hash__ = object.__hash__


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return observed.PROVIDED.get(f"{self.__name__}.{name}", Hollow())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
