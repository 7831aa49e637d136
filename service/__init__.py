"""The attnd service: an engine process, doors, and the road between them."""

from typing import Final

__version__: Final = "0.2.0"
