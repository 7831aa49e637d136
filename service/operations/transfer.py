"""Operations that copy a sequence to another pool, part by part: export and import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from attnd.wire.dtypes import DTYPE_NAMES, POOL_DTYPES, token_bytes
from pydantic import Field

from service.operations.schema.fields import (
    Count,
    Counts,
    Entries,
    Fields,
    InfoAnswer,
    PoolDType,
    SequenceId,
    pool_sizes,
    refuse,
)
from service.operations.schema.page_names import (
    NAMES,
    CacheSalt,
    ExtraKeys,
    Seconds,
    check_extra,
)
from service.operations.schema.spec import Operation, TensorSpec
from service.operations.sequences import SequenceFields

MAX_BESIDE: Final = 256
DEFAULT_PART_BYTES: Final = 16 * 2**20
DEFAULT_IDLE_S: Final = 60.0
MAX_IDLE_S: Final = 3600.0

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=["0f" * 32])]
PartBytes = Annotated[int, Field(ge=1, le=2**40)]
Generation = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["0f" * 16])]


@dataclass(frozen=True, slots=True)
class Part:
    """Pages `first_page:last_page` of a sequence at layers `first_layer:last_layer`."""

    first_page: int
    last_page: int
    first_layer: int
    last_layer: int


class Header(Fields):
    """Header of an export: its pool's geometry, the sequence's lengths, and its division in
    parts."""

    version: Literal[1] = 1
    generation: Generation
    """State of the sequence; it changes with the sequence, and requests for parts repeat it."""
    num_layers: Annotated[int, Field(ge=1)]
    page_size: Annotated[int, Field(ge=1)]
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)]
    dtype: PoolDType
    layout: Literal["NHD", "HND"]
    """Page layout of the pool; rows of an export are in token order in either case."""
    k_scale: float
    v_scale: float
    lengths: Annotated[Counts, Field(min_length=1)]
    """kv_len per layer."""
    ttl_s: Seconds | None
    """Idle seconds before deletion; null: never."""
    num_named: Count
    """Committed pages, whose names are in the tensor `token_ids` or `page_keys`."""
    cache_salt: CacheSalt
    """Salt that they are committed with."""
    extra: ExtraKeys | None = None
    """Further keys beside their token ids; absent: they have none."""
    part_bytes: PartBytes
    """Maximum bytes of k and v in a part, unless one page at one layer has more."""
    num_parts: Count

    def document(self) -> dict[str, Any]:
        """As JSON, in the form that older services know where that is possible."""
        document = self.model_dump()
        if self.extra is None:
            del document["extra"]
        return document

    @property
    def page_bytes(self) -> int:
        """Bytes of one page at one layer."""
        return self.page_size * token_bytes(self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def num_pages(self) -> int:
        return -(-max(self.lengths) // self.page_size)

    @property
    def pages_per_part(self) -> int:
        return max(1, self.part_bytes // (self.page_bytes * self.num_layers))

    @property
    def layers_per_part(self) -> int:
        """All layers, unless one page at all layers exceeds `part_bytes`."""
        return min(self.num_layers, max(1, self.part_bytes // self.page_bytes))

    @property
    def parts_per_run(self) -> int:
        """Number of parts with the same pages."""
        return -(-self.num_layers // self.layers_per_part)

    def count_parts(self) -> int:
        return -(-self.num_pages // self.pages_per_part) * self.parts_per_run

    def part(self, number: int) -> Part:
        """The part of that number; numbers run over layers first, then pages."""
        run, within = divmod(number, self.parts_per_run)
        page, layer = run * self.pages_per_part, within * self.layers_per_part
        return Part(
            page,
            min(page + self.pages_per_part, self.num_pages),
            layer,
            min(layer + self.layers_per_part, self.num_layers),
        )


class ExportFields(Fields):
    id: SequenceId
    part: Count | None = None
    """Number of the part; absent: the header and the pages' names."""
    generation: Generation | None = None
    """With `part`: the header's generation. A 409 if the sequence has changed since."""
    before: Digest | None = None
    """With `part`: digest of the previous part; for the first, of the header."""
    part_bytes: PartBytes = DEFAULT_PART_BYTES
    """Maximum bytes of k and v in a part. With `part`: the header's value, which can be smaller
    than the one requested, since a part must fit one request and one reply of this service."""
    beside: Annotated[list[SequenceId], Field(max_length=MAX_BESIDE, fail_fast=True)] | None = None
    """Without `part`: sequences that may share pages with this one."""

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        if self.part is None:
            for name in ("generation", "before"):
                if getattr(self, name) is not None:
                    refuse(name, getattr(self, name), "requires part")
            return
        for name in ("generation", "before"):
            if getattr(self, name) is None:
                refuse(name, None, "must be given with part")


class ExportAnswer(Fields):
    header: Header | None
    """Header; null in the reply with a part."""
    digest: Digest
    """Digest of the header and names, or of the part and all before it; the last part's covers the
    whole export."""
    shared: Counts | None = None
    """Without `part`: for each of `beside`, the tokens in full pages that both sequences share."""


class ImportFields(Fields):
    id: SequenceId
    """Id of the sequence in this pool."""
    header: Header | None = None
    """Header of the export, with its `digest` and its page names as a tensor: starts or resumes the
    import."""
    part: Count | None = None
    """Number of the part that the request has, with its `digest` and its tensors k and v."""
    before: Digest | None = None
    """With `part`: digest of the previous part; required only if that was skipped because its pages
    are cached."""
    digest: Digest
    """Digest given by the export. Without `header` and `part`: the last part's, which ends the
    import."""
    share: bool = True
    """With `header`: whether to start with named pages that are cached."""
    idle_s: Annotated[float, Field(gt=0.0, le=MAX_IDLE_S)] = DEFAULT_IDLE_S
    """With `header`: seconds without a request after which the import is cancelled."""

    def sizes(self, info: InfoAnswer) -> dict[str, int]:
        return pool_sizes(info, 0)

    def check(self, entries: Entries, info: InfoAnswer) -> None:
        """The fields and tensors of one of the three forms: `header`, `part`, or neither."""
        if self.header is not None and self.part is not None:
            rule = "cannot be combined with header: start first, then send parts"
            refuse("part", self.part, rule)
        wanted = {"k", "v"} if self.part is not None else set()
        if self.header is not None and self.header.num_named:
            wanted = {"page_keys"} if "page_keys" in entries else {"token_ids"}
        if missing := wanted - entries.keys():
            refuse(f"tensors.{min(missing)}", None, "must be given")
        if extra := entries.keys() - wanted:
            refuse(f"tensors.{min(extra)}", "given", "belongs to another form of an import")
        if self.before is not None and self.part is None:
            refuse("before", self.before, "requires part")
        if self.header is not None:
            check_header(self.header, info)
            check_names(self.header, entries)
        dtype = POOL_DTYPES[info.dtype]
        for name in sorted({"k", "v"} & entries.keys()):
            if DTYPE_NAMES[entries[name].dtype] != dtype:
                rule = f"must be {dtype}, as the pool stores rows"
                refuse(f"{name}.dtype", DTYPE_NAMES[entries[name].dtype], rule)


def check_header(header: Header, info: InfoAnswer) -> None:
    """The header agrees with itself and with the pool, except in layout."""
    same = ["num_layers", "page_size", "num_kv_heads", "head_dim", "dtype"]
    if info.dtype.startswith("fp8"):
        same += ["k_scale", "v_scale"]
    for name in same:
        given, own = getattr(header, name), getattr(info, name)
        if given != own:
            refuse(f"header.{name}", given, f"must be that of this pool, {own}")
    if len(header.lengths) != header.num_layers:
        rule = f"must be {header.num_layers}, one per layer"
        refuse("header.lengths", f"{len(header.lengths)} numbers", rule)
    least = min(header.lengths) // header.page_size
    if header.num_named > least:
        rule = f"must be at most {least}, the pages that are full at every layer"
        refuse("header.num_named", header.num_named, rule)
    if header.num_parts != header.count_parts():
        rule = f"must be {header.count_parts()}, by lengths and part_bytes"
        refuse("header.num_parts", header.num_parts, rule)


def check_names(header: Header, entries: Entries) -> None:
    """The tensors have names for `num_named` pages."""
    for name, per_page in (("token_ids", header.page_size), ("page_keys", 1)):
        entry: Any = entries.get(name)
        if entry is not None and entry.shape[0] != header.num_named * per_page:
            rule = f"must be {header.num_named * per_page}, for num_named = {header.num_named}"
            refuse(f"{name}.shape", list(entry.shape), rule)
    if header.extra is not None:
        (name,) = entries or ("token_ids",)
        count = header.num_named * header.page_size
        check_extra("header.extra", header.extra, name, count, header.page_size)


STORED: Final = tuple(
    TensorSpec(
        name,
        tuple(POOL_DTYPES.values()),
        ("n", "Hkv", "D"),
        f"{words} as the pool stores them, layer after layer",
        optional=True,
        like=like,
    )
    for name, words, like in (("k", "keys", ""), ("v", "values", "k"))
)

operation = partial(Operation, tag="transfer")

EXPORT: Final = operation(
    name="export_sequence",
    summary="Export a sequence's KV as the pool stores it, part by part",
    description="Call without `part` first. Parts can be read in any order and repeatedly, as long "
    "as the sequence does not change: to export a growing sequence, export a fork of it.",
    fields=ExportFields,
    gives=(*NAMES, *STORED),
    answer=ExportAnswer,
    scope="read",
    answer_text="The header and the names of committed pages, or one part.",
)

IMPORT: Final = operation(
    name="import_sequence",
    summary="Create a sequence from an export, part by part",
    description="Start with `header`, which allocates the pages (507 if too few). Send the parts "
    "from `next_part` on, in order. End with the last part's digest: until then the sequence does "
    "not exist, and the import is cancelled after `idle_s` without a request.",
    routing="imported",
    fields=ImportFields,
    takes=(*NAMES, *STORED),
    scope="append",
)

GET_IMPORT: Final = operation(
    name="get_import",
    summary="Progress of an import",
    routing="imported",
    fields=SequenceFields,
    scope="read",
)

CANCEL_IMPORT: Final = operation(
    name="cancel_import",
    summary="Cancel an import and free its pages",
    routing="imported",
    fields=SequenceFields,
    scope="append",
    frees=True,
    answer_text="Cancelled.",
)
