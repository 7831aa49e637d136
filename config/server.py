"""Settings of the server: addresses, sockets, limits, TLS."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from config.section import Bytes, Section


def need_quotes(value: object, info: ValidationInfo) -> object:
    """Reject numbers: YAML reads 0600 without quotes as octal and 600 as decimal."""
    if isinstance(value, int):
        raise ValueError(f'server.{info.field_name} = {value}: write it in quotes, as in "0600"')
    return value


Mode = Annotated[str, BeforeValidator(need_quotes), Field(pattern=r"^0?[0-7]{3}$")]
"""A file's permissions in octal, as chmod takes them."""


class ServerSettings(Section):
    """Addresses, limits, timeouts and TLS of the service."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 in a container."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port of HTTP; 0: chosen by the system."""

    allowed_hosts: tuple[Annotated[str, Field(min_length=1, max_length=255)], ...] = ()
    """Names, without ports, that HTTP requests can have in `Host`, in addition to loopback names
    and `server.host`; for example a proxy's. Other names get 403, which protects against web pages
    whose name resolves to this machine. Empty: without keys only these names, with keys or
    `auth.open` all; `*`: all. In the environment: `["attnd.example.org"]`."""

    uds: Annotated[str | None, Field(min_length=1)] = None
    """Path of a Unix socket for HTTP, instead of host and port. It avoids the TCP stack, and the
    file's mode controls access."""

    uds_mode: Mode = "0600"
    """Mode of the HTTP socket: 0660 admits the service's group, 0666 all users of the machine."""

    http_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of HTTP processes on the port. Raise it if one uses a whole core while the engine does
    not: many connections with large bodies, or JSON tensors."""

    socket: Annotated[str | None, Field(min_length=1)] = None
    """Path of the engine's socket for sessions on this machine. Absent: `attnd-UID/PORT.sock` in
    the directory for temporary files, or the path of `server.uds` followed by `.road`. To share it
    with another container, use a directory that belongs to the service."""

    socket_mode: Mode = "0600"
    """Mode of the engine's socket: 0660 admits the service's group."""

    socket_uids: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = ()
    """Additional users allowed to open sessions, besides the service's own and root. The modes of
    the socket and its directory must admit them too. In the environment: `[1000, 1001]`."""

    secret_file: Annotated[str | None, Field(min_length=1)] = None
    """File with a secret, readable by the service's user only, by which the engine knows HTTP
    processes that another program starts (uvicorn). Absent: there are none, and each start makes a
    secret of its own."""

    live: bool = True
    """Whether there are the page `/live`, which shows pool, tree and load, and its operation
    `snapshot`. They cost nothing while the page is closed."""

    max_sessions: Annotated[int, Field(ge=1, le=65536)] = 256
    """Maximum number of sessions with the engine, including the doors', which are always accepted.
    Each costs a file descriptor, a frame buffer and its arena. Half as many connections, at least
    16, can wait before their HELLO; a further one closes the oldest of the host with the most."""

    max_arena_bytes: Annotated[Bytes, Field(ge=2**16)] = 2**30
    """Maximum arena of one session or HTTP door: the shared memory that a caller can use."""

    pinned_arena_bytes: Annotated[Bytes, Field(ge=0)] = 256 * 2**20
    """Maximum size of arenas that are pinned, so that the GPU reads and writes them directly.
    Pinned memory cannot be swapped; 0: none. CUDA only."""

    max_device_sessions: Annotated[int, Field(ge=0, le=13)] = 8
    """Maximum number of sessions that run steps; further ones are rejected. Each uses two of the
    GPU's 32 hardware queues; the service itself uses six. CUDA only."""

    device_arena_bytes: Annotated[Bytes, Field(ge=0)] = 2 * 2**30
    """GPU memory for the arenas of sessions that run steps, besides the pool. It is allocated on
    demand and kept for later sessions. CUDA only."""

    queue_depth: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Maximum number of a namespace's operations that wait for the engine; further ones get 429.
    Deeper queues absorb bursts, shallower ones push back sooner."""

    deadline_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Deadline of operations whose request has none, in seconds, including the wait. After it they
    get 504 and change nothing."""

    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that accepted work can take after the signal to stop; five seconds later the service
    is killed. Keep it at least five seconds below the grace period of the process manager."""

    max_body_bytes: Annotated[Bytes, Field(ge=1024)] = 256 * 2**20
    """Maximum request body, which bounds the memory of one request. Raise it for prefills of more
    tokens."""

    max_answer_bytes: Annotated[Bytes, Field(ge=1024)] = 256 * 2**20
    """Maximum reply: a small request can ask for the whole pool. Larger replies are rejected (413)
    with their size and can be read in parts."""

    max_inflight_bytes: Annotated[Bytes, Field(ge=2**20)] = 2**30
    """Arena of one HTTP door: total bytes of the bodies and replies that are received, waiting or
    being sent; further requests get 429. One maximum body and one maximum reply must fit. With
    keys, one namespace can use half of it for bodies and half for replies."""

    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Maximum number of connections to one HTTP door. A further one closes one that has never had a
    valid request, else an idle one, first of the host with the most; if there is none, it gets 429
    and is closed. With keys, one namespace can have requests on half of them. Keep the number below
    the process's limit of open files."""

    max_header_bytes: Annotated[Bytes, Field(ge=1024)] = 64 * 2**10
    """Maximum size of a request's line and headers; larger ones get 431."""

    tls_cert: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with the server's certificate and its chain. SIGHUP reloads certificate and key."""

    tls_key: Annotated[str | None, Field(min_length=1)] = None
    """PEM file with the certificate's private key."""

    tls_client_ca: Annotated[str | None, Field(min_length=1)] = None
    """CA bundle for client certificates (mutual TLS), as a PEM file. Health checks need a
    certificate too."""

    idle_timeout_s: Annotated[float, Field(gt=0.0)] = 75.0
    """Seconds after which an idle connection is closed. Keep it above the idle timeout of clients
    and proxies, to avoid requests on a closing connection."""

    receive_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds from a request's first byte to its last; later ones get 408. Raise it for large
    bodies over slow links."""

    @property
    def url_host(self) -> str:
        """`host` as in URLs: IPv6 addresses in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @model_validator(mode="after")
    def check_together(self) -> ServerSettings:
        room = self.max_body_bytes + self.max_answer_bytes
        if self.max_inflight_bytes < room:
            raise ValueError(
                f"server.max_inflight_bytes = {self.max_inflight_bytes}: one maximum body and one "
                f"maximum reply must fit, {room} bytes: raise it, or lower server.max_body_bytes "
                "or server.max_answer_bytes"
            )
        if self.max_inflight_bytes > self.max_arena_bytes:
            raise ValueError(
                f"server.max_inflight_bytes = {self.max_inflight_bytes}: a door's arena must not "
                f"exceed server.max_arena_bytes = {self.max_arena_bytes}: raise that too"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                f"server.tls_cert = {self.tls_cert}: TLS requires both server.tls_cert and "
                "server.tls_key"
            )
        if self.tls_cert is not None and self.uds is not None:
            raise ValueError(
                f"server.tls_cert = {self.tls_cert}: server.uds is a Unix socket, which has no "
                "TLS: omit one of them"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                f"server.tls_client_ca = {self.tls_client_ca}: client certificates require TLS: "
                "set server.tls_cert and server.tls_key as well"
            )
        if self.uds is not None and self.uds == self.socket:
            raise ValueError(
                f"server.socket = {self.socket}: server.uds has the same path: choose another for "
                "one of them"
            )
        return self
