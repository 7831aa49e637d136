"""Where the records are, and the stamp that says which model's bytes they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

MAX_MODEL: Final = 128
"""Characters of a model's name in a stamp; the digest has all of it."""
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")
DIGEST_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of every adapter.

    `url` is a service's URL, or the path of its engine's socket. `revision` names the weights.
    `deadline_s` bounds each call; a call that takes longer is a miss.
    """

    url: str
    api_key: str = field(default="", repr=False)
    api_key_file: str = ""
    revision: str = ""
    deadline_s: float = 2.0
    lease_s: float = 60.0
    threads: int = 4

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ValueError for an unknown option, a wrong type, or a number out of bounds."""
        kinds: dict[str, Any] = {"deadline_s": float, "lease_s": float, "threads": int}
        known = {one.name for one in fields(cls)}
        if unknown := given.keys() - known:
            names, others = ", ".join(sorted(unknown)), ", ".join(sorted(known))
            raise ValueError(f"unknown options {names}; there are {others}")
        if not given.get("url"):
            raise ValueError('url is missing: give "url": "http://127.0.0.1:8080", or a socket')
        for name, value in given.items():
            kind = kinds.get(name, str)
            accepted = (int, float) if kind is float else (kind,)
            if not isinstance(value, accepted) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected {kind.__name__}")
            if kind is not str and not 0 < value < 86_400:
                raise ValueError(f"{name} is {value}, expected more than 0 and less than 86400")
        return cls(**given)

    def key(self) -> str:
        """The caller's API key, from its file where one is given."""
        if self.api_key_file:
            return Path(self.api_key_file).read_text(encoding="utf-8").strip()
        return self.api_key


def stamp_of(engine: str, model: str, facts: Mapping[str, object]) -> str:
    """A stamp that is equal only where the engine, the model and all `facts` are equal.

    `facts`: everything that the bytes of a record depend on and its key does not name.
    """
    text = json.dumps([engine, model, facts], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in model)
    return f"{engine} {shown[-MAX_MODEL:]} {digest}"


def revision_of(model: str, given: str) -> str:
    """`given`, or the digest of every file of weights in the directory `model`.

    Raises ValueError where `model` is no directory of weights: its name alone does not say which
    weights it has, and bytes of other weights would be served in silence.
    """
    if given:
        return given
    directory = Path(model)
    files = sorted({one for glob in WEIGHTS for one in directory.glob(glob)})
    if not any(one.suffix != ".json" for one in files):
        raise ValueError(
            f"revision is missing, and {model!r} is no directory with weights whose digest could "
            "stand for it: give revision, such as the commit of the model's repository"
        )
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        digests = list(pool.map(file_digest, files))
    names = [one.name for one in files]
    return hashlib.sha256(json.dumps([names, digests]).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
