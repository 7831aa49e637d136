"""Authentication, shared by all doors."""

from __future__ import annotations

from typing import Final

from config.sections import AuthSettings
from service.errors import Unauthorized
from service.keys import Keys, keys_of, read_again
from service.processes.handed_files import ReadFile, from_disk
from service.tenants import Tenant

SCHEME: Final = b"bearer"
REMEDY: Final = "send the header Authorization: Bearer KEY"


class Authenticator:
    """The service's keys; `keys` is replaced when the key file is read again."""

    __slots__ = ("auth", "keys", "read")

    def __init__(self, auth: AuthSettings, keys: Keys, read: ReadFile = from_disk) -> None:
        self.auth = auth
        self.keys = keys
        self.read = read

    def tenant_of(self, authorization: bytes) -> Tenant:
        """The tenant of an Authorization header's value, empty for none. Raises Unauthorized."""
        scheme, _, key = authorization.partition(b" ")
        if authorization and scheme.lower() != SCHEME:
            raise Unauthorized(f"the scheme of Authorization is not Bearer: {REMEDY}")
        return self.keys.check(key.strip(), REMEDY).tenant

    def read_again(self) -> None:
        """Read the key file again; an unusable file changes nothing."""
        self.keys = read_again(self.auth, self.keys, self.read) or self.keys


def make_authenticator(auth: AuthSettings, read: ReadFile = from_disk) -> Authenticator | None:
    """None for a service without keys. Raises KeysError."""
    keys = keys_of(auth, read)
    return None if keys is None else Authenticator(auth, keys, read)
