"""Settings of pool, backend, keys, engine, cache and log; `server.py` and `cluster.py` have others.

Each has its default, its limits and a help text. Settings are plain values, passed from process to
process as JSON; `settings.py` loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from config.cluster import ClusterSettings
from config.groups import MAX_GROUPS, GroupSettings, check_groups
from config.section import Bytes, Section
from config.server import ServerSettings

DEFAULT_NUM_PAGES: Final = 512
MAX_SLOTS: Final = 2**31 - 1
"""Maximum of num_pages * page_size: token slots are int32."""


Endpoint = Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$", max_length=256)]
PATHS: Final = {
    "server": ("uds", "socket", "secret_file", "tls_cert", "tls_key", "tls_client_ca"),
    "auth": ("keys_file",),
    "cache": ("disk_path",),
}
"""Settings that name files, by section."""
LOCAL = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


class PoolSettings(Section):
    """The page pool: the model determines its shape, the machine its size."""

    num_layers: Annotated[int, Field(ge=1, le=4096)] = 4
    """Number of the model's attention layers. Each page has K and V of every layer."""

    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of the model's KV heads; if heads are split over services, this service's share."""

    head_dim: Annotated[int, Field(ge=1, le=1024)] = 128
    """Dimension of the model's heads."""

    page_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per page. Larger pages copy faster and plan cheaper; smaller pages waste fewer slots
    at the end of a sequence and share shorter prefixes. The kernels are tuned for 16 to 64."""

    num_pages: Annotated[int | None, Field(ge=1)] = None
    """Number of pages to allocate; 512 if memory_fraction is absent too."""

    memory_fraction: Annotated[float | None, Field(gt=0.0, le=0.95)] = None
    """Share of the free memory at start (of the GPU; of the host for the CPU backend) to allocate.
    Use it in production, where the pool should fill the machine."""

    layout: Literal["NHD", "HND"] = "NHD"
    """Order within a page: tokens before heads (NHD) or heads before tokens (HND). Change it to
    share the pool's memory with a library that requires the other."""

    dtype: Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"] = "fp16"
    """Storage type of K and V. fp8 halves memory and traffic and loses some accuracy."""

    k_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Scale of stored K in fp8 pools: K is the stored value times this. Choose it so that the
    model's largest K fits."""

    v_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Scale of stored V in fp8 pools: V is the stored value times this."""

    groups: Annotated[tuple[GroupSettings, ...], Field(max_length=MAX_GROUPS)] = ()
    """Groups of layers, for models whose layers differ; each has `layers`, `num_kv_heads` and
    `head_dim`, and can have `v_head_dim`, `window` and `dtype`. They replace num_layers,
    num_kv_heads and head_dim. page_size is that of the first group without a window. Pools of
    several groups have no tiers, exports and imports, and no steps through layers of two groups."""

    window_slack: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Tokens before a group's window that stay, for callers that truncate after speculation."""

    @model_validator(mode="after")
    def check_together(self) -> PoolSettings:
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ValueError("pool.num_pages and pool.memory_fraction cannot be combined")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale != 1.0 and not self.dtype.startswith("fp8"):
                raise ValueError(f"pool.{name} = {scale}: only fp8 pools have scales")
        if self.groups:
            check_groups(self.groups)
            for name in ("num_layers", "num_kv_heads", "head_dim"):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    raise ValueError(f"pool.{name} = {value}: pool.groups has it: leave it out")
        elif self.window_slack:
            given = f"pool.window_slack = {self.window_slack}"
            raise ValueError(f"{given}: no layers have a window: set pool.groups too")
        if self.num_pages is not None and self.num_pages * self.page_size > MAX_SLOTS:
            raise ValueError(
                f"pool.num_pages = {self.num_pages}: times page_size exceeds 2**31 - 1 slots"
            )
        return self


class BackendSettings(Section):
    """The implementation of the kernels, and its device."""

    kind: Literal["auto", "cpu", "cuda", "none"] = "auto"
    """Implementation of the kernels. `auto`: cuda if CuPy is installed and finds a GPU, else cpu.
    Name one to fail at start instead of falling back. `none`: no pool of pages and no attention,
    only records, in cache.host_bytes and cache.disk_path."""

    device: Annotated[int, Field(ge=0, le=255)] = 0
    """Index of the GPU. One service uses one GPU."""

    @model_validator(mode="after")
    def check_device(self) -> BackendSettings:
        if self.kind == "cpu" and self.device != 0:
            raise ValueError(f"backend.device = {self.device}: the cpu backend has only device 0")
        return self


class AuthSettings(Section):
    """Authentication by API keys, and exceptions from it."""

    keys_file: Annotated[str | None, Field(min_length=1)] = None
    """File with one API key per line: SHA-256, namespace, scopes. `attnd key new` prints a key and
    its line; SIGHUP reloads the file. Absent: no authentication, every caller has all scopes."""

    open: bool = False
    """Whether a service without keys may listen on addresses that other machines can reach. Set it
    only on a trusted network."""

    open_metrics: bool = False
    """Whether `/metrics` needs no key. By default it needs one with the scope admin if the service
    has keys; set it for a Prometheus on a private network."""

    open_docs: bool = False
    """Whether `/docs` and `/openapi.json` need no key. By default they need one if the service has
    keys, and browsers send none."""

    open_live: bool = False
    """Whether the data of the page `/live` needs no key. By default one with the scope admin is
    typed into the page if the service has keys."""

    @property
    def is_private(self) -> bool:
        """Whether the service must not listen on addresses that other machines can reach."""
        return self.keys_file is None and not self.open


class EngineSettings(Section):
    """Distribution of the engine's time and memory among callers."""

    numerics: Literal["fast", "invariant"] = "fast"
    """Whether the last bits of attention may depend on the rest of its batch. `fast`: the same call
    twice returns the same bits. `invariant`: a row's bits depend on its query, its keys and its
    scoring alone, whatever is shared, cached, chunked or batched; slower."""

    slice_ms: Annotated[float, Field(gt=0.0, le=60_000.0)] = 20.0
    """Estimated milliseconds after which long work yields to other operations. Shorter slices keep
    small operations fast beside long prefills and cost some throughput."""

    max_sequences: Annotated[int, Field(ge=1, le=2**24)] = 65_536
    """Maximum number of live sequences; further requests get 507. Each costs the engine some
    kilobytes, with or without pages."""

    max_leases: Annotated[int, Field(ge=1, le=2**24)] = 65_536
    """Maximum number of leases on cached pages; further requests get 429. Each costs the engine
    about 300 bytes and keeps its pages from eviction."""

    namespace_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Maximum share of engine.max_sequences, engine.max_leases and server.max_sessions that one
    namespace can use, with keys. Lower it if many tenants share an engine; 1: no limit."""


class OipSettings(Section):
    """The gateway: the Open Inference Protocol v2, as Triton and KServe speak it, on `server.host`
    with the certificate and the keys of HTTP."""

    http_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port of the protocol over HTTP; absent: none."""

    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port of the protocol over gRPC; absent: none."""

    max_calls: Annotated[int, Field(ge=1, le=65536)] = 64
    """Maximum number of concurrent calls and streams of the gateway; further ones get 429, or
    RESOURCE_EXHAUSTED, except health checks. With keys, one namespace can use half. Each can hold a
    message in the gateway's memory, besides its arena."""

    max_message_bytes: Annotated[Bytes, Field(ge=2**16, lt=2**31)] = 64 * 2**20
    """Maximum size of a request of the gateway, which holds it in memory before copying it to the
    arena. Raise it for prefills of more tokens."""

    client_cert: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with a certificate and its key, which the gateway shows to a cluster, or a service
    elsewhere, that has `server.tls_client_ca`."""

    @property
    def is_on(self) -> bool:
        """Whether there is a gateway."""
        return self.http_port is not None or self.grpc_port is not None


class CacheSettings(Section):
    """The prefix cache: committed pages that stay after their sequences are deleted."""

    high_watermark: Annotated[float, Field(gt=0.0, le=1.0)] = 0.90
    """Share of the pool's pages in use above which cached pages are evicted in advance, a few per
    turn. Lower it if large prompts arrive in bursts; 1: evict only when pages are needed."""

    events_history: Annotated[int, Field(ge=0, le=2**24)] = 16_384
    """Event history per namespace, in pages, for readers that reconnect. A page of 16 tokens takes
    about 100 bytes; 0: no events."""

    host_bytes: Annotated[Bytes, Field(ge=0)] = 0
    """Host memory for pages that the pool evicts, in bytes; 0: none. Several times the pool's size
    is useful."""

    disk_path: Annotated[str | None, Field(min_length=1)] = None
    """Directory for pages that the pool evicts, which survive a restart; absent: none. Requires
    cache.disk_bytes and cache.model. One service uses a directory at a time."""

    disk_bytes: Annotated[Bytes, Field(ge=0)] = 0
    """Size of the files in cache.disk_path, in bytes."""

    records_share: Annotated[float | None, Field(ge=0.0, le=1.0)] = None
    """Share of cache.host_bytes and cache.disk_bytes for records, the opaque blocks of other
    engines; absent: 0, and 1 with backend.kind = none. Pages have the rest."""

    write: Literal["evict", "commit"] = "evict"
    """When pages are written down: when the pool evicts them, or when they are committed. With
    `commit`, which needs cache.disk_path, a commit's reply waits until its pages are on disk."""

    model: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """Name and revision of the model, such as `org/model@5f0b02c`. Pages on disk carry it, because
    page keys do not cover the weights; pages of other models are ignored."""

    zmq_endpoint: Endpoint | None = None
    """ZeroMQ endpoint where events are published in vLLM's format, such as `tcp://127.0.0.1:5557`
    or `ipc:///run/attnd/events`; absent: none. It has no authentication, so addresses that other
    machines can reach require `auth.open`. Requires the extra `zmq`."""

    zmq_replay_endpoint: Endpoint | None = None
    """ZeroMQ endpoint where subscribers request missed events; absent: none."""

    zmq_topic: Annotated[str, Field(max_length=256)] = ""
    """Topic of published events; subscribers filter by topic prefix."""

    zmq_layout: Literal["map", "array"] = "map"
    """Layout of published events: `map` (named fields) for subscribers of vLLM 0.24 and newer,
    `array` (fields by position) for vLLM 0.11 to 0.23."""

    zmq_namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "default"
    """Namespace whose events are published, with keys."""

    @model_validator(mode="after")
    def check_disk(self) -> CacheSettings:
        if self.disk_path is None:
            for name, is_given in (
                ("disk_bytes", self.disk_bytes > 0),
                ("write", self.write == "commit"),
            ):
                if is_given:
                    given = f"cache.{name} = {getattr(self, name)}"
                    raise ValueError(f"{given}: there is no disk tier: set cache.disk_path too")
            return self
        if not self.disk_bytes:
            raise ValueError(
                f"cache.disk_path = {self.disk_path}: set cache.disk_bytes to the size of its files"
            )
        return self

    @model_validator(mode="after")
    def check_together(self) -> CacheSettings:
        if self.zmq_endpoint is None and self.zmq_replay_endpoint is not None:
            raise ValueError(
                f"cache.zmq_replay_endpoint = {self.zmq_replay_endpoint}: it replays the events of "
                "cache.zmq_endpoint: set that too"
            )
        if self.zmq_endpoint is not None and self.events_history == 0:
            raise ValueError(
                f"cache.zmq_endpoint = {self.zmq_endpoint}: cache.events_history = 0 keeps no "
                "events: raise it"
            )
        return self

    @property
    def open_endpoints(self) -> tuple[str, ...]:
        """The endpoints that other machines can reach."""
        given = (self.zmq_endpoint, self.zmq_replay_endpoint)
        return tuple(one for one in given if one is not None and not one.startswith(LOCAL))


class LogSettings(Section):
    """Log lines on standard error, and traces."""

    format: Literal["console", "json"] = "console"
    """Format of log lines: `console` for people, `json` (one object per line) for collectors."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level."""

    otlp_endpoint: Annotated[str | None, Field(pattern=r"^https?://")] = None
    """Collector of OpenTelemetry spans, such as http://collector:4318/v1/traces. It receives a span
    for each HTTP request whose `traceparent` is sampled. Requires the extra `otel`."""


class Settings(Section):
    """attnd: attention and KV cache as a service. `--version` prints the version;
    `key new --namespace N` creates a key."""

    pool: PoolSettings = PoolSettings()
    backend: BackendSettings = BackendSettings()
    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    oip: OipSettings = OipSettings()
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    config: Path | None = None
    """YAML file whose settings override the defaults."""

    @model_validator(mode="after")
    def check_tiers(self) -> Settings:
        cache, groups = self.cache, len(self.pool.groups)
        given = cache.disk_path or cache.host_bytes
        if groups > 1 and given:
            name = "disk_path" if cache.disk_path else "host_bytes"
            rule = "the tiers take pools of one group of layers: leave it out"
            raise ValueError(f"cache.{name} = {given}: pool.groups has {groups} groups: {rule}")
        return self

    @model_validator(mode="after")
    def check_router(self) -> Settings:
        if self.server.http_workers > 1 and not self.cluster.is_one:
            given = f"server.http_workers = {self.server.http_workers}"
            raise ValueError(
                f"{given}: a cluster has one router: leave it out, or run two clusters"
            )
        return self

    def with_absolute_paths(self) -> Settings:
        """A copy with absolute paths, for processes with another working directory."""
        sections = {
            section: getattr(self, section).model_copy(
                update={
                    name: str(Path(path).absolute())
                    for name in names
                    if (path := getattr(getattr(self, section), name)) is not None
                }
            )
            for section, names in PATHS.items()
        }
        return self.model_copy(update=sections)

    def with_own_disk_path(self, name: str) -> Settings:
        """A copy in which one of several engines has a directory of its own."""
        if (path := self.cache.disk_path) is None:
            return self
        cache = self.cache.model_copy(update={"disk_path": f"{path}/{name}"})
        return self.model_copy(update={"cache": cache})

    @model_validator(mode="after")
    def check_endpoints(self) -> Settings:
        if not self.auth.open and (beyond := self.cache.open_endpoints):
            raise ValueError(
                f"{beyond[0]}: ZeroMQ has no authentication: listen at tcp://127.0.0.1 or ipc://, "
                "or set auth.open: true"
            )
        return self

    @model_validator(mode="after")
    def check_records(self) -> Settings:
        cache, path = self.cache, self.cache.disk_path
        if path is not None and self.records_share < 1.0 and cache.model is None:
            raise ValueError(
                f"cache.disk_path = {path}: page keys do not cover the model's weights: set "
                "cache.model to its name and revision"
            )
        if self.records_share and not cache.host_bytes and path is None:
            given = f"cache.records_share = {self.records_share}"
            if self.backend.kind == "none":
                given = "backend.kind = none"
            raise ValueError(
                f"{given}: records need a tier: set cache.host_bytes or cache.disk_path"
            )
        if self.backend.kind == "none" and self.records_share < 1.0:
            given = f"cache.records_share = {cache.records_share}"
            raise ValueError(f"{given}: with backend.kind = none there are no pages: leave it out")
        if self.records_share and not self.cluster.is_one:
            raise ValueError("records are for a service of one engine: leave out the cluster")
        return self

    @property
    def records_share(self) -> float:
        """Share of the tiers that records have."""
        if self.cache.records_share is None:
            return float(self.backend.kind == "none")
        return self.cache.records_share

    @property
    def cache_of_pages(self) -> CacheSettings:
        """The settings of the cache with the bytes that pages have of its tiers."""
        if not self.records_share:
            return self.cache
        left = 1.0 - self.records_share
        sizes = {
            name: int(left * getattr(self.cache, name)) for name in ("host_bytes", "disk_bytes")
        }
        path = self.cache.disk_path if sizes["disk_bytes"] else None
        return self.cache.model_copy(update={**sizes, "disk_path": path})

    @property
    def reads_again(self) -> bool:
        """Whether there are files that SIGHUP reloads."""
        return self.auth.keys_file is not None or self.server.tls_cert is not None
