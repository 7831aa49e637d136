"""Requests: a checked operation with its tensors, and the place of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attnd.wire.images import RESPONSE, Shaped, header
from numpy.typing import NDArray

from kernels.tensor import PinnedArray
from service.errors import AnswerTooLarge
from service.image.json_text import dump_json
from service.image.writing import in_order, lay, num_bytes, size
from service.operations.schema.spec import Operation
from service.tenants import OPEN, Tenant

Array = NDArray[Any]
HEADER_BYTES: Final = 256
TENSOR_BYTES: Final = 128
"""Maximum size of a header beside its fields, and of its entry for one tensor."""


class DoesNotFit(AnswerTooLarge):
    """The answer is larger than its place; it needs `needed` bytes."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(needed, capacity, "name a place of that size for the answer")
        self.needed = needed


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """An answer's header, the tensors in their order behind it, and the size of it all."""

    head: bytes
    tensors: tuple[Shaped, ...]
    size: int

    @classmethod
    def of(cls, text: str, shapes: Sequence[Shaped]) -> AnswerLayout:
        """For fields as JSON `text`; widest dtypes go first."""
        tensors = in_order(shapes)
        head = header(RESPONSE, text, tensors)
        return cls(head, tensors, size(head, tensors))


class AnswerPlace:
    """Memory for one answer. `memory` None: as much as it takes, of its own (no caller waits).

    `limit` bounds any answer, whatever the place. `length` is that of the image laid last; laying
    the same layout again gives the same tensors.
    """

    __slots__ = ("image", "layout", "length", "limit", "memory", "pinned", "tensors")

    def __init__(
        self, memory: memoryview | None = None, limit: int = 2**63, pinned: bool = False
    ) -> None:
        self.memory = memory
        self.limit = limit
        self.pinned = pinned
        self.image: memoryview | None = None
        self.length = 0
        self.layout: AnswerLayout | None = None
        self.tensors: dict[str, Array] = {}

    def require(self, text_bytes: int, shapes: Sequence[Shaped] = (), remedy: str = "") -> None:
        """Refuse an answer of so much JSON, escaped, and these tensors, before anything is changed.

        Raises `AnswerTooLarge`, or `DoesNotFit` with what would do.
        """
        self.require_bytes(answer_bytes(text_bytes, shapes), remedy)

    def require_bytes(self, needed: int, remedy: str = "") -> None:
        """As `require`, for `answer_bytes`."""
        if needed > self.limit:
            raise AnswerTooLarge(needed, self.limit, remedy or "request less per call")
        if self.memory is not None and needed > len(self.memory):
            raise DoesNotFit(needed, len(self.memory))

    def lay(self, fields: dict[str, Any], shapes: tuple[Shaped, ...] = ()) -> dict[str, Array]:
        """Write the header, and give the tensors' memory behind it."""
        return self.lay_text(dump_json(fields), shapes)

    def lay_text(self, text: str, shapes: tuple[Shaped, ...] = ()) -> dict[str, Array]:
        """As `lay`, with the fields as JSON."""
        return self.lay_out(AnswerLayout.of(text, shapes))

    def lay_again(self, text: str) -> None:
        """Write other fields, as long as those laid last, before the same tensors."""
        if self.image is None or self.layout is None:
            raise RuntimeError("nothing is laid: this is a bug")
        head = header(RESPONSE, text, self.layout.tensors)
        if len(head) != len(self.layout.head):
            raise RuntimeError("fields of another length: this is a bug")
        self.image[: len(head)] = head

    def lay_out(self, layout: AnswerLayout) -> dict[str, Array]:
        """As `lay`, with the header made already."""
        head, end = layout.head, layout.size
        if layout is self.layout and self.memory is not None:
            self.memory[: len(head)] = head
            self.length = end
            return self.tensors
        image = memoryview(bytearray(end)) if self.memory is None else self.memory
        if end > len(image):
            raise DoesNotFit(end, len(image))
        self.image, self.length = image, end
        laid = lay(image, head, layout.tensors)
        if self.pinned:
            laid = {name: array.view(PinnedArray) for name, array in laid.items()}
        self.layout, self.tensors = layout, laid
        return laid


def answer_bytes(text_bytes: int, shapes: Sequence[Shaped] = ()) -> int:
    """Maximum size of an answer with these tensors and `text_bytes` of escaped JSON."""
    needed = HEADER_BYTES + text_bytes
    for shape in shapes:
        needed += TENSOR_BYTES + num_bytes(shape)
    return needed


@dataclass(slots=True, eq=False)
class Request:
    """A checked operation with its tensors, the place of its answer, and its tenant.

    Sequences in its fields have the tree's names, see `Tenant`. A request serves again when its
    session sends the same header from the same place, with the same place for the answer and the
    same tenant. `known` caches what handlers derive from the header alone, for all requests with
    that header.
    """

    operation: Operation
    fields: Any
    tensors: dict[str, Array]
    place: AnswerPlace
    tenant: Tenant = OPEN
    known: dict[str, Any] = field(default_factory=dict)
    step: Any = None
    """A step's lane: `StepPlace`."""
    report: Callable[[], None] | None = None
    """Completes the answer once nothing can be undone any more: what is known of token ids."""
