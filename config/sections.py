"""Every setting of the service: what it is, why one would change it, and what it may be.

Plain values, which cross from process to process as JSON; `config/settings.py` says where they
come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

DEFAULT_NUM_PAGES: Final = 512
MAX_SLOTS: Final = 2**31 - 1
"""Token slots are int32: num_pages * page_size may not pass this."""


def need_quotes(value: object, info: ValidationInfo) -> object:
    """YAML reads 0600 without quotes as a number in octal, and 600 as one that is not."""
    if isinstance(value, int):
        raise ValueError(f'server.{info.field_name} = {value}: write it in quotes, as in "0600"')
    return value


Mode = Annotated[str, BeforeValidator(need_quotes), Field(pattern=r"^0?[0-7]{3}$")]
"""A file's permissions in octal, as chmod takes them."""


Endpoint = Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$", max_length=256)]
LOCAL = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


class Section(BaseModel):
    """A group of settings: frozen, and without room for a key it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


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


class ServerSettings(Section):
    """Where the service listens, and how much it takes on."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 inside a container."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port; 0 lets the system choose one."""

    uds: Annotated[str | None, Field(min_length=1)] = None
    """Path of a Unix socket for HTTP in place of host and port, for callers on this machine: it
    saves the TCP stack, and the file's mode says who may call."""

    uds_mode: Mode = "0600"
    """Mode of that socket: 0660 lets the service's group in, 0666 everybody on the machine."""

    http_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that speak HTTP on the same port. Raise it when one of them is busy on a whole core
    while the engine is not: many connections with large bodies, or JSON tensors."""

    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port, at the same host, of the gRPC door (Open Inference Protocol v2); none when absent.
    It needs the extra `attnd[grpc]`."""

    grpc_max_calls: Annotated[int, Field(ge=1, le=65536)] = 64
    """Calls and streams of the gRPC door at once; one more is answered RESOURCE_EXHAUSTED. Each may
    hold a message of server.max_body_bytes in the door's memory, beside its arena."""

    client_shm: bool = False
    """The Open Inference Protocol's system shared memory: clients on this machine name objects in
    /dev/shm, and tensors are read and written there. Whoever reaches the service without a key can
    then have any such object of its user read and written; with keys, only those whose names begin
    with the key's namespace and a colon."""

    client_shm_regions: Annotated[int, Field(ge=1, le=65536)] = 256
    """Regions of such memory that one namespace may have registered at once."""

    socket: Annotated[str | None, Field(min_length=1)] = None
    """Path of the engine's own socket, for sessions on this machine; by default
    `attnd-UID/PORT.sock` in the directory for temporary files, or the path of `server.uds` with
    `.road` behind it. Name one to share it with a container beside this one, in a directory of the
    service's own."""

    socket_mode: Mode = "0600"
    """Mode of the engine's socket: 0660 for a caller who runs as another user of the group."""

    socket_uids: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = ()
    """Users whose sessions are let in, beside the service's own and root; the socket's mode and its
    directory must let them through as well. In the environment: `[1000, 1001]`."""

    live: bool = True
    """The page `/live`, which shows pool, tree and load as they are, and the operation `snapshot`
    beneath it. The engine does nothing for it while nobody looks; false takes it away."""

    max_sessions: Annotated[int, Field(ge=1, le=65536)] = 256
    """Connections to the engine's socket, the HTTP doors' among them; one more is refused. Each
    costs a file descriptor, a frame buffer and its arena."""

    max_arena_bytes: Annotated[int, Field(ge=2**16)] = 2**30
    """Largest arena of one session, an HTTP door's among them: it bounds the shared memory that a
    caller can have."""

    pinned_arena_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """CUDA: arenas up to this size are registered with the device, which then reads and writes them
    itself. Pinned memory cannot be swapped out; 0 registers none."""

    max_device_sessions: Annotated[int, Field(ge=0, le=64)] = 8
    """CUDA: sessions that may run steps at a time, each on a stream of its own; one more is
    refused. Beyond eight or so they share the device's queues and may wait for each other."""

    device_arena_bytes: Annotated[int, Field(ge=0)] = 2 * 2**30
    """CUDA: device memory for the arenas of those sessions, all together, beside the pool. It is
    taken as it is asked for, and kept for later sessions."""

    queue_depth: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Operations of one namespace that may wait for the engine; one more is answered 429. Deeper
    queues ride out bursts, shallower ones push back sooner."""

    deadline_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds an operation may take, waiting included, when its request names no deadline; then it
    is answered 504 and has changed nothing."""

    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that a stopping service gives admitted work; what still runs five seconds later is
    killed. Keep it five seconds and more below the grace period of whatever stops the service."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**20
    """Largest request body. Raise it for prefills of more tokens at once; it bounds the memory one
    request can take."""

    max_json_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Largest JSON body, and largest answer as JSON: numbers as text take a door tens of times
    longer to read and write than safetensors."""

    max_answer_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**20
    """Largest answer: a small request can ask for all of the pool. Larger ones are refused with
    their size (413), and are read in parts."""

    max_inflight_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    """Bodies and answers that one HTTP door holds at once, received, waiting or being sent: its
    arena. What does not fit is answered 429. One largest body and one largest answer must fit."""

    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Open connections of one HTTP door; one more is answered 429 and closed. Keep it below the
    process's limit of open files."""

    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 2**10
    """Request line and headers of one request; more is answered 431."""

    max_header_count: Annotated[int, Field(ge=8)] = 100
    """Header lines of one request; more are answered 431."""

    tls_cert: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with the certificate that HTTP is served with, the chain behind it. SIGHUP has
    certificate and key read again."""

    tls_key: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with that certificate's private key."""

    tls_client_ca: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with the authorities whose certificates clients must show (mutual TLS), health
    checks among them."""

    idle_timeout_s: Annotated[float, Field(gt=0.0)] = 75.0
    """Seconds a connection may stay open between requests. Keep it above the time for which clients
    and proxies keep idle connections, or some request meets a closing one."""

    receive_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds in which a request must arrive whole, from its first byte; then 408. Raise it for
    large bodies over slow links."""

    @property
    def url_host(self) -> str:
        """`host` as URLs have it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @model_validator(mode="after")
    def check_together(self) -> ServerSettings:
        room = self.max_body_bytes + self.max_answer_bytes
        if self.max_inflight_bytes < room:
            raise ValueError(
                f"server.max_inflight_bytes = {self.max_inflight_bytes}: one largest body and one "
                f"largest answer must fit, {room} bytes: raise it, or lower server.max_body_bytes "
                "or server.max_answer_bytes"
            )
        if self.max_inflight_bytes > self.max_arena_bytes:
            raise ValueError(
                f"server.max_inflight_bytes = {self.max_inflight_bytes}: a door's arena may not "
                f"pass server.max_arena_bytes = {self.max_arena_bytes}: raise that too"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                f"server.tls_cert = {self.tls_cert}: TLS takes both, server.tls_cert and "
                "server.tls_key"
            )
        if self.tls_cert is not None and self.uds is not None:
            raise ValueError(
                f"server.tls_cert = {self.tls_cert}: server.uds is a Unix socket, which takes no "
                "TLS: leave out one of them"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                f"server.tls_client_ca = {self.tls_client_ca}: clients show certificates over TLS "
                "only: set server.tls_cert and server.tls_key as well"
            )
        if self.uds is not None and self.uds == self.socket:
            raise ValueError(
                f"server.socket = {self.socket}: server.uds has the same path: HTTP and the engine "
                "need a socket each"
            )
        return self


class AuthSettings(Section):
    """Who may call, and what is open to everybody."""

    keys_file: Annotated[str | None, Field(min_length=1)] = None
    """File with a line for each key: SHA-256, namespace, scopes. `python -m service key new` prints
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
    machine it needs `auth.open`. It needs the extra `attnd[zmq]`."""

    zmq_replay_endpoint: Endpoint | None = None
    """Another, where a subscriber asks for what it has missed."""

    zmq_topic: Annotated[str, Field(max_length=256)] = ""
    """Topic of what is published; subscribers choose by how it begins."""

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
    """On Ray: seconds that an engine which is taken away waits for its sequences to be deleted; it
    takes no new ones meanwhile, and what is left then is lost."""

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


class LogSettings(Section):
    """What is written to standard error."""

    format: Literal["console", "json"] = "console"
    """`console` for people, `json` (one object a line) for log collectors."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""

    otlp_endpoint: Annotated[str | None, Field(pattern=r"^https?://")] = None
    """Collector of OpenTelemetry spans, such as http://collector:4318/v1/traces: it gets one for
    each HTTP request whose `traceparent` says that its caller samples. Needs attnd[otel]."""


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

    @model_validator(mode="after")
    def check_endpoints(self) -> Settings:
        if not self.auth.open and (beyond := self.cache.open_endpoints):
            raise ValueError(
                f"{beyond[0]}: ZeroMQ asks for no keys: listen at tcp://127.0.0.1 or ipc://, or "
                "set auth.open: true"
            )
        return self

    @model_validator(mode="after")
    def check_client_shm(self) -> Settings:
        if self.server.client_shm and self.auth.open and self.auth.keys_file is None:
            raise ValueError(
                "server.client_shm = True: with auth.open and without keys, whoever is on the "
                "network could have this machine's shared memory read: set auth.keys_file, or "
                "leave out auth.open"
            )
        return self

    @property
    def reads_again(self) -> bool:
        """Whether there are files that SIGHUP has read again."""
        return self.auth.keys_file is not None or self.server.tls_cert is not None
