"""Keys: how one is made, the file that lists them by digest, whose is the one that is shown."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from config.sections import AuthSettings
from service.errors import Unauthorized
from service.processes.handed_files import ReadFile, from_disk, why_unreadable
from service.tenants import SCOPES, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.keys")
BEGINNING: Final = "attnd_"
"""Of every key, so that tools that look for leaked secrets can find one."""
RANDOM_BYTES: Final = 32
MAX_KEYS: Final = 16_384
"""A frame has 16 bits for the tenant."""
DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
LINE: Final = "SHA-256 of the key in hexadecimal, its namespace, its scopes with commas between"


class KeysError(ValueError):
    """The file cannot be used; one line that names the file, the line of it, and the rule."""


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the file."""

    digest: bytes
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of a service, by their digests.

    The look-up needs no comparison in constant time. Its time depends on the digest of what was
    shown; whoever learned digests of valid keys from it could not turn one back into a key.
    """

    by_digest: Mapping[bytes, Key]

    def find(self, shown: bytes) -> Key | None:
        """Whose key this is."""
        return self.by_digest.get(hashlib.sha256(shown).digest())

    def check(self, shown: bytes, remedy: str) -> Key:
        """Whose key this is. Raises Unauthorized; `remedy` says how a key is shown."""
        if not shown:
            raise Unauthorized(f"this service asks for a key: {remedy}")
        key = self.find(shown)
        if key is None:
            raise Unauthorized("this key is not, or no longer, one of the service's")
        return key

    def holder(self, digest: bytes) -> Tenant | None:
        """Who has the key of this digest now."""
        key = self.by_digest.get(digest)
        return None if key is None else key.tenant


def read_keys(path: str, read: ReadFile = from_disk) -> Keys:
    """The keys of a file: a line each, empty ones and what follows a # left out.

    Raises KeysError.
    """
    try:
        text = read(path).decode()
    except OSError as error:
        raise KeysError(f"auth.keys_file {path}: {why_unreadable(error)}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"auth.keys_file {path}: it is no UTF-8 text: {error.reason}") from error
    found: dict[bytes, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if words := line.partition("#")[0].split():
            try:
                key = read_line(words)
            except ValueError as error:
                raise KeysError(f"auth.keys_file {path}, line {number}: {error}") from error
            if key.digest in found:
                raise KeysError(f"auth.keys_file {path}, line {number}: this key is there twice")
            found[key.digest] = key
    if not found:
        raise KeysError(f"auth.keys_file {path}: no key is in it: `attnd key new` makes one")
    if len(found) > MAX_KEYS:
        raise KeysError(f"auth.keys_file {path}: {len(found)} keys, at most {MAX_KEYS} may be")
    return Keys(found)


def keys_of(auth: AuthSettings, read: ReadFile = from_disk) -> Keys | None:
    """The keys of a service that is starting; None where it has none. Raises KeysError."""
    return None if auth.keys_file is None else read_keys(auth.keys_file, read)


def read_again(auth: AuthSettings, before: Keys | None, read: ReadFile = from_disk) -> Keys | None:
    """The keys now; what cannot be used is told in the log, and the keys stay as they were."""
    try:
        keys = keys_of(auth, read)
    except KeysError as error:
        LOG.error("%s: the keys stay as they were", error)
        return before
    if keys is not None:
        LOG.info("%d keys are valid now", len(keys.by_digest))
    return keys


def read_line(words: list[str]) -> Key:
    """One line's words as a key. Raises ValueError with the rule that they break."""
    if len(words) != 3:
        raise ValueError(f"{len(words)} words, 3 must be: {LINE}")
    digest, namespace, scopes = words
    if not DIGEST.fullmatch(digest):
        raise ValueError("its first word is no SHA-256: 64 hexadecimal digits, not the key itself")
    return Key(bytes.fromhex(digest), tenant_of(namespace, scopes.split(",")))


def new_key() -> str:
    """A key that nobody guesses: 256 random bits."""
    return BEGINNING + secrets.token_urlsafe(RANDOM_BYTES)


def line_of(key: str, namespace: str, scopes: Iterable[str]) -> str:
    """The line of a key in the file. Raises ValueError for a namespace or scope that cannot be."""
    tenant = tenant_of(namespace, scopes)
    listed = ",".join(scope for scope in SCOPES if scope in tenant.scopes)
    return f"{hashlib.sha256(key.encode()).hexdigest()} {tenant.namespace} {listed}"
