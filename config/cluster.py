"""Settings of a cluster: its engines, and when to start and stop them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from config.section import Section


class ClusterSettings(Section):
    """Several engines behind one service."""

    engines: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of engine processes on this machine behind one HTTP door, each with a pool of
    `pool.num_pages`; on CUDA engine i uses GPU `backend.device` + i. An engine that dies is
    restarted, its sequences are lost (410, `lost_sequence`). 0: all engines are on other hosts."""

    members: tuple[Annotated[str, Field(pattern=r"^tcp:.+:[0-9]{1,5}$")], ...] = ()
    """Engines on other hosts, as `tcp:HOST:PORT` of their `cluster.listen`. In the environment:
    `["tcp:10.0.0.2:9080"]`."""

    listen: Annotated[str | None, Field(pattern=r"^.+:[0-9]{1,5}$")] = None
    """HOST:PORT where doors on other hosts connect to the engine over TCP; engine i listens on PORT
    + i. Connections prove the cluster's secret and are not encrypted: use a private network."""

    secret_file: Annotated[str | None, Field(min_length=1)] = None
    """File with the secret of the cluster, the same on all hosts: at least 32 characters, such as
    `openssl rand -hex 32` prints."""

    lost_after_s: Annotated[float, Field(ge=0.0)] = 10.0
    """Seconds that an engine on another host can be unreachable before its sequences are lost;
    until then calls for them get 503."""

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
    """Seconds that a removed engine has to move its sequences, and to wait for sequences that
    cannot move; the rest are lost. On Ray."""

    ingresses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of nodes with doors, at `server.port` of each, on Ray."""

    ingress_resource: Annotated[str | None, Field(min_length=1)] = None
    """Custom resource that nodes with doors must have, so that a load balancer can know them, on
    Ray."""

    @model_validator(mode="after")
    def check_together(self) -> ClusterSettings:
        if not self.engines and not self.members:
            raise ValueError("cluster.engines = 0: name engines elsewhere in cluster.members")
        if self.max_engines is not None and self.max_engines < max(self.engines, 1):
            raise ValueError(
                f"cluster.max_engines = {self.max_engines}: below cluster.engines = {self.engines}"
            )
        needs = "cluster.listen" if self.listen is not None else "cluster.members"
        if (self.listen is not None or self.members) and self.secret_file is None:
            raise ValueError(f"{needs}: hosts authenticate by cluster.secret_file: set that too")
        return self

    @property
    def is_one(self) -> bool:
        """Whether there is only one engine, and so no cluster."""
        return self.engines == 1 and not self.members
