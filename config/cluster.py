"""Settings of a cluster: its engines, and when to start and stop them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from config.section import Section


class ClusterSettings(Section):
    """Several engines behind one service."""

    engines: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of engine processes on this machine behind one HTTP door, each with a pool of
    `pool.num_pages`; on CUDA engine i uses GPU `backend.device` + i. An engine that dies is
    restarted, its sequences are lost (410, `lost_sequence`). On Ray: the number of engines on all
    its nodes."""

    max_engines: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Maximum number of engines on Ray; `cluster.engines` is the minimum. Absent: always that
    many."""

    least_free: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """Minimum share of all pages that sequences do not hold, on Ray: below it an engine is added;
    one is removed if twice this share stays without it."""

    most_queue_s: Annotated[float, Field(gt=0.0)] = 0.25
    """Seconds that calls wait for their turn above which an engine is added, on Ray."""

    grow_after_s: Annotated[float, Field(ge=0.0)] = 10.0
    """Seconds of shortage before an engine is added, on Ray."""

    shrink_after_s: Annotated[float, Field(ge=0.0)] = 300.0
    """Seconds of surplus before an engine is removed, on Ray."""

    drain_s: Annotated[float, Field(ge=0.0)] = 300.0
    """Seconds for which a removed engine serves the sequences that it has; the rest are lost. On
    Ray."""

    ingress_resource: Annotated[str | None, Field(min_length=1)] = None
    """Custom resource that the node with the router must have, so that a load balancer can know it,
    on Ray."""

    @model_validator(mode="after")
    def check_together(self) -> ClusterSettings:
        if self.max_engines is not None and self.max_engines < self.engines:
            raise ValueError(
                f"cluster.max_engines = {self.max_engines}: below cluster.engines = {self.engines}"
            )
        return self

    @property
    def is_one(self) -> bool:
        """Whether there is only one engine, and so no cluster."""
        return self.engines == 1
