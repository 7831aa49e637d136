"""A launch that fails on the device."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy")

from kernels.backend import DeviceLost, PoolGeometry  # noqa: E402


def test_a_failed_launch_loses_the_device_with_a_clear_message() -> None:
    from kernels.cuda.backend import CudaBackend

    backend = CudaBackend(PoolGeometry(2, 9, 5, 3, 80, dtype="fp16"), poison=True)
    with pytest.raises(DeviceLost, match="cannot be trusted"), backend.guarded():
        function = backend.library.function(
            next(spec for spec in backend.library.specs if spec.source == "merge/merge"),
            "merge_states",
        )
        function((1,), (4096,), (np.zeros(1, np.int32),))
    with pytest.raises(DeviceLost):
        backend.gather(0, np.zeros(1, np.int32), "fp16")
