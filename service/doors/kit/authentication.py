"""Who may call through a door: what it asks of those who come, once for all protocols."""

from __future__ import annotations

from typing import Final

from config.sections import AuthSettings
from service.errors import Unauthorized
from service.keys import Keys, keys_of, read_again
from service.processes.handed_files import ReadFile, from_disk
from service.tenants import Tenant

SCHEME: Final = b"bearer"
REMEDY: Final = "send the header Authorization: Bearer KEY"


class Gate:
    """The keys of a door's service; `keys` is another object when they have been read again."""

    __slots__ = ("auth", "keys", "read")

    def __init__(self, auth: AuthSettings, keys: Keys, read: ReadFile = from_disk) -> None:
        self.auth = auth
        self.keys = keys
        self.read = read

    def tenant_of(self, authorization: bytes) -> Tenant:
        """Whoever shows this Authorization header's value, empty for none. Raises Unauthorized."""
        scheme, _, key = authorization.partition(b" ")
        if authorization and scheme.lower() != SCHEME:
            raise Unauthorized(f"Authorization is of another scheme than Bearer: {REMEDY}")
        return self.keys.check(key.strip(), REMEDY).tenant

    def read_again(self) -> None:
        """The file of keys may have changed."""
        self.keys = read_again(self.auth, self.keys, self.read) or self.keys


def make_gate(auth: AuthSettings, read: ReadFile = from_disk) -> Gate | None:
    """None where there are no keys, and so no gate. Raises KeysError."""
    keys = keys_of(auth, read)
    return None if keys is None else Gate(auth, keys, read)
