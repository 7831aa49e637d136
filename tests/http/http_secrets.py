"""Files of keys and of certificates, for services that tests start."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme

from service.keys import line_of

Holders = Mapping[str, tuple[str, Sequence[str]]]
"""The namespace and the scopes of each key."""

KEYS: Holders = {
    "a-key-of-red": ("red", ["read", "append"]),
    "a-key-of-blue": ("blue", ["read", "append"]),
    "a-reader-of-red": ("red", ["read"]),
    "an-operator": ("ops", ["admin"]),
}


def write_keys(path: Path, *names: str, keys: Holders = KEYS) -> None:
    path.write_text("\n".join(line_of(name, *keys[name]) for name in names or keys))


def keys_file(directory: Path, keys: Holders = KEYS) -> tuple[str, str]:
    """The arguments of a service with these keys, in `directory`/keys."""
    write_keys(directory / "keys", keys=keys)
    return ("--auth.keys-file", str(directory / "keys"))


def both(*scopes: str) -> Holders:
    """A key of the namespace red and one of blue, each named after its namespace."""
    return {name: (name, scopes) for name in ("red", "blue")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


HOST = "127.0.0.1"


@dataclass(frozen=True)
class Files:
    """PEM files of an authority, of the service, and of a client."""

    ca: str
    cert: str
    key: str
    client: str

    @property
    def served(self) -> tuple[str, ...]:
        return ("--server.tls-cert", self.cert, "--server.tls-key", self.key)


def write_files(directory: Path, authority: trustme.CA) -> Files:
    issued, client = authority.issue_cert(HOST), authority.issue_cert("caller@example.org")
    files = Files(*(str(directory / name) for name in ("ca", "cert", "key", "client")))
    authority.cert_pem.write_to_path(files.ca)
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(files.cert, append=index > 0)
    issued.private_key_pem.write_to_path(files.key)
    client.private_key_and_cert_chain_pem.write_to_path(files.client)
    return files


def trusting(files: Files, cert: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    if cert is not None:
        context.load_cert_chain(cert)
    return context
