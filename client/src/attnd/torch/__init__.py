"""Steps from torch: q, k, v and o in memory shared with the engine, in the order of torch's stream.

See `TorchSession`. Needs torch; on CUDA its own driver library is all there is beside it.
"""

from attnd.steps.slots import Slots
from attnd.steps.step import Step
from attnd.torch.merging import merge
from attnd.torch.session import Placement, TimeSliced, TorchSession

__all__ = [
    "Placement",
    "Slots",
    "Step",
    "TimeSliced",
    "TorchSession",
    "merge",
]
