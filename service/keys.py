"""API keys: makes them, reads the key file, authenticates by them, and `attnd key new`."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from config.sections import AuthSettings
from service.errors import Unauthorized
from service.processes.handed_files import ReadFile, from_disk, why_unreadable
from service.tenants import SCOPES, Tenant, tenant_of

LOG: Final = logging.getLogger("attnd.keys")
BEGINNING: Final = "attnd_"
"""Begins every key, so that tools that search for leaked secrets find it."""
RANDOM_BYTES: Final = 32
MAX_KEYS: Final = 16_384
"""A frame has 16 bits for the tenant."""
DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
REMOVED_SCOPE: Final = "move"
LINE: Final = "SHA-256 NAMESPACE SCOPE[,SCOPE...]"


class KeysError(ValueError):
    """The key file cannot be used; one line with the file, its line, and the rule."""


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the key file."""

    digest: bytes
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of a service, by their digests.

    The look-up needs no comparison in constant time: its time depends on digests, and a digest of a
    valid key does not reveal the key.
    """

    by_digest: Mapping[bytes, Key]

    def find(self, key: bytes) -> Key | None:
        """The key's line; None for an unknown key."""
        return self.by_digest.get(hashlib.sha256(key).digest())

    def check(self, given: bytes, remedy: str) -> Key:
        """The key's line. Raises Unauthorized; `remedy` says how to send a key."""
        if not given:
            raise Unauthorized(f"this service requires a key: {remedy}")
        key = self.find(given)
        if key is None:
            raise Unauthorized("unknown or revoked API key")
        return key

    def holder(self, digest: bytes) -> Tenant | None:
        """The tenant of the key with this digest; None if it was revoked."""
        key = self.by_digest.get(digest)
        return None if key is None else key.tenant


def read_keys(path: str, read: ReadFile = from_disk) -> Keys:
    """Read a key file: a key per line; empty lines and comments from # on are ignored.

    Raises KeysError.
    """
    try:
        text = read(path).decode()
    except OSError as error:
        raise KeysError(f"auth.keys_file {path}: {why_unreadable(error)}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"auth.keys_file {path}: not UTF-8 text: {error.reason}") from error
    found: dict[bytes, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if words := line.partition("#")[0].split():
            try:
                key = read_line(words)
            except ValueError as error:
                raise KeysError(f"auth.keys_file {path}, line {number}: {error}") from error
            if key.digest in found:
                raise KeysError(f"auth.keys_file {path}, line {number}: duplicate key")
            found[key.digest] = key
    if not found:
        raise KeysError(f"auth.keys_file {path}: no keys in it: `attnd key new` makes one")
    if len(found) > MAX_KEYS:
        raise KeysError(f"auth.keys_file {path}: {len(found)} keys, the limit is {MAX_KEYS}")
    return Keys(found)


def keys_of(auth: AuthSettings, read: ReadFile = from_disk) -> Keys | None:
    """The keys of a starting service; None without a key file. Raises KeysError."""
    return None if auth.keys_file is None else read_keys(auth.keys_file, read)


def read_again(auth: AuthSettings, before: Keys | None, read: ReadFile = from_disk) -> Keys | None:
    """Read the key file again; an unusable file is logged, and `before` is returned."""
    try:
        keys = keys_of(auth, read)
    except KeysError as error:
        LOG.error("%s: the keys are unchanged", error)
        return before
    if keys is not None:
        LOG.info("%d keys are valid now", len(keys.by_digest))
    return keys


def read_line(words: list[str]) -> Key:
    """The fields of one line as a key. Raises ValueError with the rule that they break."""
    if len(words) != 3:
        raise ValueError(f"{len(words)} fields, expected 3: {LINE}")
    digest, namespace, scopes = words
    given = scopes.split(",")
    if REMOVED_SCOPE in given:
        text = "a key of %s has the scope %s, which was removed: it is ignored"
        LOG.warning(text, namespace, REMOVED_SCOPE)
        given = [one for one in given if one != REMOVED_SCOPE]
    if not DIGEST.fullmatch(digest):
        raise ValueError("not a SHA-256 (64 hexadecimal digits, not the key itself) in field 1")
    return Key(bytes.fromhex(digest), tenant_of(namespace, given))


def new_key() -> str:
    return BEGINNING + secrets.token_urlsafe(RANDOM_BYTES)


def line_of(key: str, namespace: str, scopes: Iterable[str]) -> str:
    """A key's line in the key file. Raises ValueError for an invalid namespace or scope."""
    tenant = tenant_of(namespace, scopes)
    listed = ",".join(scope for scope in SCOPES if scope in tenant.scopes)
    return f"{hashlib.sha256(key.encode()).hexdigest()} {tenant.namespace} {listed}"


SCHEME: Final = b"bearer"
REMEDY: Final = "send the header Authorization: Bearer KEY"


class Authenticator:
    """The service's keys; `keys` is replaced when the key file is read again."""

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


MIN_SECRET: Final = 32
"""Characters of the secret between the service's processes."""


def secret_of(path: str | None) -> str:
    """The secret in `server.secret_file`, a new one without that file. Raises KeysError."""
    if path is None:
        return secrets.token_hex(MIN_SECRET)
    where = f"server.secret_file {path}"
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise KeysError(f"{where}: {error}: name a readable file") from error
    if mode & 0o077:
        raise KeysError(f"{where}: others can read it: chmod 600 it")
    if len(text) < MIN_SECRET:
        rule = f"at least {MIN_SECRET}: openssl rand -hex 32"
        raise KeysError(f"{where}: {len(text)} characters, expected {rule}")
    return text


SCOPE_HELP = "a permission of the key; may be given several times. Without it: read and append"


def key_command(argv: Sequence[str]) -> int:
    """`attnd key new`: print a new key and its line for `auth.keys_file`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="attnd key", description="Makes keys for `auth.keys_file`."
    )
    commands = parser.add_subparsers(required=True)
    new = commands.add_parser("new", description="Prints a key, and below it its line.")
    new.add_argument("--namespace", required=True, help="whose sequences the key is for")
    new.add_argument("--scope", action="append", choices=SCOPES, help=SCOPE_HELP)
    given = parser.parse_args(argv)
    key = new_key()
    try:
        line = line_of(key, given.namespace, given.scope or ("read", "append"))
    except ValueError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2
    print(key, line, sep="\n")
    return 0
