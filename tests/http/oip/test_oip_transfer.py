"""tritonclient, over HTTP and gRPC, exports a sequence and imports it again under another name."""

from __future__ import annotations

import numpy as np
from triton_callers import Triton, fill


def test_a_sequence_goes_out_and_in_part_by_part(triton: Triton, rng: np.random.Generator) -> None:
    k, v = fill(triton, rng, "a", 21)
    reply, names = triton.infer("export_sequence", id="a", part_bytes=2**13)
    header, before = reply["header"], reply["digest"]
    assert header["num_parts"] > 1 and not names
    reply, _ = triton.infer("import_sequence", id="b", header=header, digest=before)
    assert (reply["state"], reply["next_part"]) == ("receiving", 0)
    for part in range(header["num_parts"]):
        request = {"generation": header["generation"], "part_bytes": header["part_bytes"]}
        reply, tensors = triton.infer(
            "export_sequence", id="a", part=part, before=before, **request
        )
        before = reply["digest"]
        triton.infer("import_sequence", tensors, id="b", part=part, digest=before)
    reply, _ = triton.infer("import_sequence", id="b", digest=before)
    assert reply["state"] == "done"
    _, tensors = triton.infer("gather", layer=1, sequences=["b"])
    np.testing.assert_array_equal(tensors["k"], k)
    np.testing.assert_array_equal(tensors["v"], v)
