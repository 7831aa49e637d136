"""Settings of a cluster: how many engines, where they are, and how work is placed on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from config.section import Section


class ClusterSettings(Section):
    """Several engines that look like one service."""

    engines: Annotated[int, Field(ge=0, le=64)] = 1
    """Engine processes on this machine behind one HTTP door, each with a pool of its own, as
    `pool.num_pages` says; on CUDA engine i has GPU `backend.device` + i. One that dies takes its
    sequences along (410, `lost_sequence`), and is started again. 0 where all are elsewhere."""

    members: tuple[Annotated[str, Field(pattern=r"^tcp:.+:[0-9]{1,5}$")], ...] = ()
    """Engines on other hosts, as `tcp:HOST:PORT`, where their `cluster.listen` is. In the
    environment: `["tcp:10.0.0.2:9080"]`."""

    listen: Annotated[str | None, Field(pattern=r"^.+:[0-9]{1,5}$")] = None
    """HOST:PORT where doors on other hosts reach the engine over TCP; engine i is at PORT + i. The
    road is not encrypted, so this is for a private network; who connects proves that it has the
    secret."""

    secret_file: Annotated[str | None, Field(min_length=1)] = None
    """File with the secret of the cluster, the same on all hosts: 32 characters at least, such as
    `openssl rand -hex 32` prints."""

    lost_after_s: Annotated[float, Field(ge=0.0)] = 10.0
    """Seconds for which an engine on another host may be out of reach before its sequences count as
    lost; meanwhile calls for them are answered 503."""

    max_engines: Annotated[int, Field(ge=1, le=4096)] | None = None
    """On Ray: as many engines as there may be, `cluster.engines` being the least; absent: always as
    many as that."""

    least_free: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """On Ray: another engine is started when less than this share of all pages is not held by
    sequences, and one is taken away when twice as much would be left without it."""

    most_queue_s: Annotated[float, Field(gt=0.0)] = 0.25
    """On Ray: another engine is started when calls wait for their turn longer than this."""

    grow_after_s: Annotated[float, Field(ge=0.0)] = 10.0
    """On Ray: for so long it must have been too few before one more is started."""

    shrink_after_s: Annotated[float, Field(ge=0.0)] = 300.0
    """On Ray: for so long it must have been too many before one is taken away."""

    drain_s: Annotated[float, Field(ge=0.0)] = 300.0
    """On Ray: seconds that an engine which is taken away has to move its sequences to others, and
    to wait for those that cannot be moved; what is left then is lost."""

    ingresses: Annotated[int, Field(ge=1, le=1024)] = 1
    """On Ray: nodes that have doors, at `server.port` of each."""

    ingress_resource: Annotated[str | None, Field(min_length=1)] = None
    """On Ray: a custom resource that nodes with doors must have, so that what is in front of them
    knows which these are."""

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
            raise ValueError(f"{needs}: hosts know each other by cluster.secret_file: set that too")
        return self

    @property
    def is_one(self) -> bool:
        """Whether there is only one engine, and so no cluster."""
        return self.engines == 1 and not self.members
