"""Stands in for torchvision, which SGLang imports for pictures: its wheels need torch for CUDA."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(ModuleType):
    """Has every submodule (in lower case) and every class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__version__ = "0.28.0"
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return AnyName(name, (), {}) if name[0].isupper() else sys.modules.get(full, StandIn(full))


for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io"):
    StandIn(f"torchvision{name}")
StandIn("torchvision.transforms.v2.functional")
