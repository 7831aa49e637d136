"""The attnd service: routes, wire, engine, core."""

from typing import Final

__version__: Final = "0.1.0"
