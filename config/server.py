"""Settings of the server: addresses, sockets, limits, TLS."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from config.section import Section


def need_quotes(value: object, info: ValidationInfo) -> object:
    """YAML reads 0600 without quotes as a number in octal, and 600 as one that is not."""
    if isinstance(value, int):
        raise ValueError(f'server.{info.field_name} = {value}: write it in quotes, as in "0600"')
    return value


Mode = Annotated[str, BeforeValidator(need_quotes), Field(pattern=r"^0?[0-7]{3}$")]
"""A file's permissions in octal, as chmod takes them."""


class ServerSettings(Section):
    """Where the service listens, and how much it takes on."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 inside a container."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port; 0 lets the system choose one."""

    allowed_hosts: tuple[Annotated[str, Field(min_length=1, max_length=255)], ...] = ()
    """Names, without ports, under which HTTP requests may address the service, beside the loopback
    names and `server.host`: those of a proxy before it, for example. Other values of `Host` are
    answered 403, which protects from web pages whose name resolves to this machine. Empty: a
    service without keys accepts its own names, one with keys or `auth.open` accepts all. `*`
    accepts all. In the environment: `["attnd.example.org"]`."""

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
    It needs the extra `grpc`."""

    grpc_max_calls: Annotated[int, Field(ge=1, le=65536)] = 64
    """Calls and streams of the gRPC door at once; one more is answered RESOURCE_EXHAUSTED. With
    keys, one namespace may have half of them. Health is always answered. Each may hold a message in
    the door's memory, beside its arena."""

    grpc_max_message_bytes: Annotated[int, Field(ge=2**16, lt=2**31)] = 64 * 2**20
    """Largest message that the gRPC door receives. Raise it for prefills of more tokens at once:
    a message lies in the door's memory before it comes to the arena."""

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
    """Sessions with the engine, the HTTP doors' among them; one more is refused, unless it is a
    door's. Each costs a file descriptor, a frame buffer and its arena. Half as many connections, at
    least 16, may be open that have not said HELLO; one more ends the oldest of the host with the
    most."""

    max_arena_bytes: Annotated[int, Field(ge=2**16)] = 2**30
    """Largest arena of one session, an HTTP door's among them: it bounds the shared memory that a
    caller can have."""

    pinned_arena_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """CUDA: arenas up to this size are registered with the device, which then reads and writes them
    itself. Pinned memory cannot be swapped out; 0 registers none."""

    max_device_sessions: Annotated[int, Field(ge=0, le=13)] = 8
    """CUDA: sessions that may run steps at a time, each on two streams of its own; one more is
    refused. The device has 32 hardware queues, and the service uses six of them itself."""

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
    arena. What does not fit is answered 429. One largest body and one largest answer must fit. With
    keys one namespace has half of it for bodies and half for answers."""

    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Open connections of one HTTP door. One more closes an idle one: first those that have shown
    no valid key, then those of the host with the most. Where none is idle it is answered 429 and
    closed. Keep it below the process's limit of open files."""

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
