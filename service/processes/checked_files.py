"""The supervisor's side of key and certificate files: only good contents reach the processes.

A process that is started again gets what the others have, not what lies on disk by then. So a file
that has become unusable does not end a service that runs.
"""

from __future__ import annotations

import logging
from typing import Final

from config.sections import Settings
from service.doors.kit.tls import TlsError, make_tls
from service.keys import KeysError, keys_of
from service.processes.handed_files import HandedFiles, ReadFile, anonymous_memory, from_disk

LOG: Final = logging.getLogger("attnd.files")


class CheckedFiles:
    """The last good contents of `auth.keys_file` and of the files of TLS, in the memory `fd`."""

    def __init__(self, settings: Settings) -> None:
        """Raises KeysError, TlsError."""
        self.settings = settings
        self.good: dict[str, bytes] = {}
        self.check_keys()
        self.check_tls()
        self.fd = anonymous_memory("attnd-files")
        HandedFiles(self.fd).write(self.good)

    def check_keys(self) -> None:
        """Take in the file of keys. Raises KeysError."""
        read, found = recording()
        keys_of(self.settings.auth, read)
        self.good |= found

    def check_tls(self) -> None:
        """Take in certificate and key, and at the start the authorities of clients, a change of
        which takes a restart. Raises TlsError."""
        authorities = self.settings.server.tls_client_ca
        read, found = recording()
        make_tls(self.settings.server, read)
        if authorities is not None and authorities in self.good:
            found[authorities] = self.good[authorities]
        self.good |= found

    def read_again(self) -> None:
        """Take in what is good on disk now; the log says what is not."""
        try:
            self.check_keys()
        except KeysError as error:
            LOG.error("%s: the keys stay as they were", error)
        try:
            self.check_tls()
        except TlsError as error:
            LOG.error("%s: the certificate stays as it was", error)
        HandedFiles(self.fd).write(self.good)


def recording() -> tuple[ReadFile, dict[str, bytes]]:
    """Reads from disk, and where it leaves what it has read, by path."""
    found: dict[str, bytes] = {}

    def read(path: str) -> bytes:
        found[path] = from_disk(path)
        return found[path]

    return read, found
