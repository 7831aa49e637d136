"""Client of attnd, attention and KV cache as a service: see `Client`, `AsyncClient`, `Session`.

`merge_states` merges attention states here, with numpy, when they came from several services.

It has the names of `attnd.public` and the classes of `CLASSES_OF`. All load at the first use of
one. Programs that import only a part, such as the service's supervisor, which needs
`attnd.wire.frames`, do not load numpy and the clients.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnd.calls.transfer import *  # noqa: F403
    from attnd.errors import *  # noqa: F403
    from attnd.public import *  # noqa: F403
    from attnd.results import *  # noqa: F403
    from attnd.wire.meta import *  # noqa: F403

__version__ = "0.2.0"
CLASSES_OF = ("attnd.errors", "attnd.wire.meta", "attnd.wire.answers", "attnd.calls.transfer")


def __getattr__(name: str) -> Any:
    public = vars(import_module("attnd.public")).items()
    names = {name: value for name, value in public if not name.startswith("_")}
    for module in CLASSES_OF:
        for value in vars(import_module(module)).values():
            if isinstance(value, type) and value.__module__ == module:
                names[value.__name__] = value
    globals().update(names, __all__=[*sorted(names), "__version__"])
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
