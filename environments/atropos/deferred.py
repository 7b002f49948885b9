"""Imports of atroposlib without what it imports and most of our runs never use: wandb, transformers and openai.

Together they cost three of the four CPU seconds of `import environments.base`. While atroposlib is imported, names from
these packages are stand-ins that import the real thing when they are first used: called, asked for an attribute,
subclassed or checked against. Afterwards nothing is left in `sys.modules`, so everybody else's imports get the real
packages. A package that is imported already is not touched.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGES = ("markdown", "numpy", "openai", "transformers", "wandb")


class DeferredName:
    """`module.name`, imported when it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def _real(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # typing and inspect look for these while modules are still being imported
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)


class DeferredModule(ModuleType):
    """A package whose names are stand-ins while atroposlib is imported, and its own afterwards."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            return DeferredName(self.__name__, name)
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are made when they are asked for."""


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Defer the packages inside the block. Import nothing in it but atroposlib."""
    finder = _Finder([name for name in PACKAGES if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, DeferredModule)]:
            del sys.modules[name]
