"""A stand-in for SGLang's compiled kernels, so that the real server starts on a machine without a GPU.

SGLang imports many names from `sgl_kernel` that its torch_native backend never calls. Here every name exists and raises
when it is called. Put this folder's parent on PYTHONPATH; for tests only, never in a shipped image.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0.0+standin"
__path__: list[str] = []


class _Missing:
    """A kernel, or a namespace of kernels, that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a stand-in: this process has no compiled sgl_kernel")

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every submodule of the package importable, with the same contents."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _getter(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _getter(prefix: str) -> Any:
    def get(name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{prefix}.{name}")

    return get


__getattr__ = _getter(__name__)
sys.meta_path.append(_Finder())
