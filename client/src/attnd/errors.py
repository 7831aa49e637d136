"""Everything a call can raise: one class per error code of the service, and the transport's own.

{tree}

After a `ServiceError` nothing has changed in the service. In a cluster, a batch over several
engines may have changed what `problem["done"]` names, also in an earlier attempt. After
`ReplyLost` and `TimedOut` the call may or may not have been executed.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnd.wire.errors import *  # noqa: F403
from attnd.wire.errors import AttndError


class TransportError(AttndError):
    """No answer was received; `__cause__` is the system's own exception where there is one."""


class ConnectionFailed(TransportError):
    """The connection was refused or could not be made: nothing was sent."""


class ArenaFull(ConnectionFailed):
    """A session's arena has no room for a request or its answer, and cannot grow."""


class ReplyLost(TransportError):
    """The connection broke after the request was sent: it may or may not have been executed."""


class TimedOut(TransportError):
    """The client's timeout or the call's deadline passed; the request may have been executed."""


class NeverReady(TimedOut, TimeoutError):
    """The service was not ready within the timeout of `wait_ready`; the message has its reason."""


class EngineFailed(AttndError):
    """The engine in this process could not start, or ended; the message has the reason. The process
    can open another one."""


class DeviceLost(EngineFailed):
    """The CUDA context of the process is lost: the process must end."""


class ProtocolError(AttndError):
    """The answer breaks the service's contract."""


def tree(error: type[AttndError], indent: str = "") -> Iterator[str]:
    """The classes below an error, a line each: status and members of the service's."""
    kind = getattr(error, "kind", None)
    facts = "" if kind is None else f"{kind.status} {', '.join(kind.members)}".rstrip()
    yield f"{indent}{error.__name__:<{32 - len(indent)}}{facts}".rstrip()
    for one in error.__subclasses__():
        yield from tree(one, indent + "    ")


__doc__ = (__doc__ or "").format(tree="\n".join(tree(AttndError)))
