"""Steps from torch: q, k, v and o in memory shared with the engine, in the order of torch's stream.

See `TorchSession`, and `EmbeddedSession` for one with its engine in this process. Needs torch; on
CUDA its own driver library is all there is beside it.
"""

from typing import TYPE_CHECKING, Any

from attnd.steps.slots import Slots
from attnd.steps.step import Step
from attnd.torch.merging import merge
from attnd.torch.session import Placement, TimeSliced, TorchSession

if TYPE_CHECKING:
    from attnd.torch.embedded import EmbeddedSession as EmbeddedSession

__all__ = [
    "Placement",
    "Slots",
    "Step",
    "TimeSliced",
    "TorchSession",
    "merge",
]


def __getattr__(name: str) -> Any:
    """`EmbeddedSession`, at whose first use the service is imported."""
    if name != "EmbeddedSession":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnd.torch.embedded import EmbeddedSession

    return EmbeddedSession
