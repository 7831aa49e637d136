"""Every setting of the service: what it is, why one would change it, and what it may be; those of
the server and of clusters in files of their own.

Plain values, which cross from process to process as JSON; `config/settings.py` says where they
come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from config.cluster import ClusterSettings
from config.section import Section
from config.server import ServerSettings

DEFAULT_NUM_PAGES: Final = 512
MAX_SLOTS: Final = 2**31 - 1
"""Token slots are int32: num_pages * page_size may not pass this."""


Endpoint = Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$", max_length=256)]
PATHS: Final = {
    "server": ("uds", "socket", "tls_cert", "tls_key", "tls_client_ca"),
    "auth": ("keys_file",),
    "cluster": ("secret_file",),
}
"""Settings that name files, by section."""
LOCAL = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


class PoolSettings(Section):
    """The page pool: its shape must be the model's, its size is what the machine can give."""

    num_layers: Annotated[int, Field(ge=1, le=4096)] = 4
    """The model's attention layers; each has its own K and V for every page."""

    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] = 8
    """The model's KV heads (per service, when heads are split over several)."""

    head_dim: Annotated[int, Field(ge=1, le=1024)] = 128
    """The model's dimension per head."""

    page_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per page. Larger pages copy faster and plan cheaper; smaller ones waste fewer slots at
    the end of a sequence and share prefixes at a finer grain. 16 to 64 are tuned for."""

    num_pages: Annotated[int | None, Field(ge=1)] = None
    """Pages to allocate, for an exact size; with neither this nor memory_fraction, 512."""

    memory_fraction: Annotated[float | None, Field(gt=0.0, le=0.95)] = None
    """Share of the memory that is free at start (the GPU's, or the host's on the CPU backend) to
    give to the pool. Use it in production, where the pool should take what is there."""

    layout: Literal["NHD", "HND"] = "NHD"
    """Order inside a page: tokens before heads (NHD) or heads before tokens (HND). Change it to
    share the pool's bytes with a library that wants the other."""

    dtype: Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"] = "fp16"
    """Storage type of K and V. fp8 halves the memory and the traffic, at some accuracy."""

    k_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """fp8 only: a stored K times this is the real K. Set it so that the model's largest K fits."""

    v_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """fp8 only: a stored V times this is the real V."""

    @model_validator(mode="after")
    def check_together(self) -> PoolSettings:
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ValueError("give pool.num_pages or pool.memory_fraction, not both")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale != 1.0 and not self.dtype.startswith("fp8"):
                raise ValueError(f"pool.{name} = {scale}: only fp8 pools have scales")
        if self.num_pages is not None and self.num_pages * self.page_size > MAX_SLOTS:
            raise ValueError(
                f"pool.num_pages = {self.num_pages}: times page_size passes 2**31 - 1 slots"
            )
        return self


class BackendSettings(Section):
    """Which implementation of the kernels runs, and where."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes cuda when CuPy is installed and sees a GPU, else cpu. Name one to fail at start
    instead of falling back."""

    device: Annotated[int, Field(ge=0, le=255)] = 0
    """Index of the GPU, when a machine has several; one service owns one GPU."""

    @model_validator(mode="after")
    def check_device(self) -> BackendSettings:
        if self.kind == "cpu" and self.device != 0:
            raise ValueError(f"backend.device = {self.device}: the cpu backend has only device 0")
        return self


class AuthSettings(Section):
    """Who may call, and what is open to everybody."""

    keys_file: Annotated[str | None, Field(min_length=1)] = None
    """File with a line for each key: SHA-256, namespace, scopes. `attnd key new` prints
    a key and its line; SIGHUP has the file read again. Without one everybody who reaches the
    service may do everything."""

    open: bool = False
    """Without keys, the service refuses to listen beyond this machine unless this is true: say it
    where the network itself keeps others out."""

    open_metrics: bool = False
    """With keys, `/metrics` asks for one with the scope admin; true shows it to everybody, such as
    a Prometheus on a private network."""

    open_docs: bool = False
    """With keys, `/docs` and `/openapi.json` ask for any key, which a browser does not send; true
    shows them to everybody."""

    open_live: bool = False
    """With keys, what the page `/live` shows asks for one with the scope admin, which is typed into
    the page; true shows it to everybody."""

    @property
    def is_private(self) -> bool:
        """Whether the service must not be reached from other machines."""
        return self.keys_file is None and not self.open


class EngineSettings(Section):
    """How the engine shares its time and memory among callers."""

    slice_ms: Annotated[float, Field(gt=0.0, le=60_000.0)] = 20.0
    """Milliseconds after which long work lets others have a turn, by estimate. Shorter slices keep
    small operations fast beside long prefills, at some cost for every cut."""

    max_sequences: Annotated[int, Field(ge=1, le=2**24)] = 65_536
    """Sequences alive at once; more are answered 507. Each costs the engine some kilobytes, pages
    or none."""

    max_leases: Annotated[int, Field(ge=1, le=2**24)] = 65_536
    """Leases on cached pages held at once; one more is answered 429. Each costs the engine some 300
    bytes, besides the pages that it keeps from eviction."""

    namespace_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """With keys: the largest share of engine.max_sequences, engine.max_leases and
    server.max_sessions that one namespace may have. Lower it where many tenants share an engine; 1
    lets one of them take everything."""


class CacheSettings(Section):
    """The prefix cache: committed pages that outlive their sequences."""

    high_watermark: Annotated[float, Field(gt=0.0, le=1.0)] = 0.90
    """Share of the pool's pages in use above which cached ones are evicted ahead of need, a few
    each turn. Lower it where large prompts come in bursts; 1 evicts only what is needed at once."""

    events_history: Annotated[int, Field(ge=0, le=2**24)] = 16_384
    """Pages that the events kept for each namespace may tell of, for readers who come back. A page
    of 16 tokens takes some 100 bytes; 0 keeps no events at all."""

    zmq_endpoint: Endpoint | None = None
    """ZeroMQ endpoint, such as `tcp://127.0.0.1:5557` or `ipc:///run/attnd/events`, where events
    are published in vLLM's format; none when absent. It asks nobody for a key, so beyond this
    machine it needs `auth.open`. It needs the extra `zmq`."""

    zmq_replay_endpoint: Endpoint | None = None
    """Another, where a subscriber asks for what it has missed."""

    zmq_topic: Annotated[str, Field(max_length=256)] = ""
    """Topic of what is published; subscribers choose by how it begins."""

    zmq_layout: Literal["map", "array"] = "map"
    """Layout of a published event: `map` as vLLM 0.24 and newer have it, named fields; `array` as
    vLLM 0.11 to 0.23, fields by position. Subscribers are written for one of them."""

    zmq_namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "default"
    """With keys: the namespace whose events are published."""

    @model_validator(mode="after")
    def check_together(self) -> CacheSettings:
        if self.zmq_endpoint is None and self.zmq_replay_endpoint is not None:
            raise ValueError(
                f"cache.zmq_replay_endpoint = {self.zmq_replay_endpoint}: it replays what "
                "cache.zmq_endpoint publishes: set that too"
            )
        if self.zmq_endpoint is not None and self.events_history == 0:
            raise ValueError(
                f"cache.zmq_endpoint = {self.zmq_endpoint}: cache.events_history = 0 keeps no "
                "events: raise it"
            )
        return self

    @property
    def open_endpoints(self) -> tuple[str, ...]:
        """Those that other machines may reach."""
        given = (self.zmq_endpoint, self.zmq_replay_endpoint)
        return tuple(one for one in given if one is not None and not one.startswith(LOCAL))


class LogSettings(Section):
    """What is written to standard error."""

    format: Literal["console", "json"] = "console"
    """`console` for people, `json` (one object a line) for log collectors."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""

    otlp_endpoint: Annotated[str | None, Field(pattern=r"^https?://")] = None
    """Collector of OpenTelemetry spans, such as http://collector:4318/v1/traces: it gets one for
    each HTTP request whose `traceparent` says that its caller samples. Needs the extra `otel`."""


class Settings(Section):
    """attnd: attention and KV cache as a service. `--version` prints which version this is;
    `key new --namespace N` makes a key."""

    pool: PoolSettings = PoolSettings()
    backend: BackendSettings = BackendSettings()
    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    config: Path | None = None
    """A YAML file laid over the defaults."""

    def with_absolute_paths(self) -> Settings:
        """The same settings for processes with another working directory."""
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

    @model_validator(mode="after")
    def check_endpoints(self) -> Settings:
        if not self.auth.open and (beyond := self.cache.open_endpoints):
            raise ValueError(
                f"{beyond[0]}: ZeroMQ asks for no keys: listen at tcp://127.0.0.1 or ipc://, or "
                "set auth.open: true"
            )
        return self

    @property
    def reads_again(self) -> bool:
        """Whether there are files that SIGHUP has read again."""
        return self.auth.keys_file is not None or self.server.tls_cert is not None
