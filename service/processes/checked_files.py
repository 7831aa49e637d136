"""The supervisor checks key and certificate files, and hands usable contents to its processes.

A restarted process gets the contents that the others have, not those on disk. So a file that has
become unusable does not end a running service.
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
    """The last usable contents of `auth.keys_file` and of the files of TLS, in the memory `fd`."""

    def __init__(self, settings: Settings) -> None:
        """Raises KeysError, TlsError."""
        self.settings = settings
        self.usable: dict[str, bytes] = {}
        self.check_keys()
        self.check_tls()
        self.fd = anonymous_memory("attnd-files")
        HandedFiles(self.fd).write(self.usable)

    def check_keys(self) -> None:
        """Read the key file. Raises KeysError."""
        read, found = recording()
        keys_of(self.settings.auth, read)
        self.usable |= found

    def check_tls(self) -> None:
        """Read certificate and key, and at the start the authorities of clients, whose change needs
        a restart. Raises TlsError."""
        authorities = self.settings.server.tls_client_ca
        read, found = recording()
        make_tls(self.settings.server, read)
        if authorities is not None and authorities in self.usable:
            found[authorities] = self.usable[authorities]
        self.usable |= found

    def read_again(self) -> None:
        """Read the files again; an unusable one is logged."""
        try:
            self.check_keys()
        except KeysError as error:
            LOG.error("%s: the keys are unchanged", error)
        try:
            self.check_tls()
        except TlsError as error:
            LOG.error("%s: the certificate is unchanged", error)
        HandedFiles(self.fd).write(self.usable)


def recording() -> tuple[ReadFile, dict[str, bytes]]:
    """A function that reads from disk, and a dict to which it adds the contents, by path."""
    found: dict[str, bytes] = {}

    def read(path: str) -> bytes:
        found[path] = from_disk(path)
        return found[path]

    return read, found
