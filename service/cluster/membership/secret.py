"""The secret that authenticates the processes of a service, and the hosts of a cluster."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from config.cluster import ClusterSettings
from service.processes.handed_files import why_unreadable

SECRET_BYTES: Final = 32
MIN_CHARACTERS: Final = 32


class SecretError(Exception):
    """The secret file cannot be used; one line that says why."""


def secret_of(cluster: ClusterSettings) -> str:
    """The secret in the configured file; without a file a new one, for this start.

    Raises SecretError.
    """
    if cluster.secret_file is None:
        return secrets.token_hex(SECRET_BYTES)
    place = f"cluster.secret_file {cluster.secret_file}"
    try:
        text = Path(cluster.secret_file).read_text(encoding="ascii").strip()
    except OSError as error:
        raise SecretError(f"{place}: {why_unreadable(error)}") from error
    except UnicodeDecodeError as error:
        raise SecretError(f"{place}: expected ASCII text: {error.reason}") from error
    if len(text) < MIN_CHARACTERS:
        rule = f"{len(text)} characters, expected at least {MIN_CHARACTERS}"
        raise SecretError(f"{place}: {rule}: write what `openssl rand -hex 32` prints")
    return text
