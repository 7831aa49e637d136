"""The sequences of one batch in the service: forwards over them, forks, cuts, and their end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from attnd.calls.control import NewSequence
from attnd.errors import AttndError
from attnd.transformers.columns import Columns, hide, mask_of, plan
from attnd.transformers.releases import CACHE
from attnd.transformers.roads import Road, Scoring, Step, delete, outside_graphs, spread

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v of a layer, `[rows, heads, columns, head_dim]`."""
Recorder = Callable[[int, States, Scoring], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a forward: batch rows, columns that are new; `device` is the model's."""

    rows: int
    count: int
    num_qo_heads: int
    device: torch.device


class Batch:
    """Row b of a batch is sequence `names[b]`; `columns` are the stored columns of each row.

    A forward counts once it ran through all layers. One that did not end is undone before anything
    else happens. For one thread.
    """

    def __init__(self, road: Road[Any], num_layers: int) -> None:
        self.road = road
        self.num_layers = num_layers
        self.names: list[str] = []
        self.columns: Columns | None = None
        self.closed = False
        self.latest: Step | None = None
        """The step that began last."""
        self.recorder: Recorder | None = None
        """Attends in place of the road, while a decode is recorded."""
        self._step: Step | None = None
        self.handle: Any = None
        self._done: set[int] = set()
        self._last: Any = None
        self._before: Columns | None = None
        self._caller: object = None
        """The model whose call is running, or was interrupted."""
        self._begun: list[Columns | None] = []
        """The columns before the first forward that was completed in this call."""

    @property
    def covered(self) -> int:
        """Columns that forwards have covered, padding included."""
        return 0 if self.columns is None else self.columns.covered

    def attend(
        self, layer: int, qkv: States, visible: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Store k and v of a layer and attend; `[rows, columns, num_qo_heads, head_dim]`.

        `visible [rows, covered + columns]` hides padding; None hides nothing. The first layer
        begins a forward, the last one completes it; an error undoes all of it, and so does `leave`
        where the model fails after its last layer.
        """
        if self.recorder is not None:
            return self.recorder(layer, qkv, scoring)
        rows, heads, count, _ = qkv[0].shape
        try:
            if self._step is None or layer in self._done:
                self.begin(Shape(rows, count, heads, qkv[0].device), visible, scoring)
            step = self._step
            if step is None or count != step.forward.count:
                raise ValueError(f"a layer has {count} columns, those before it had others")
            if step.forward.tokens:
                o = self.road.attend(self.handle, layer, qkv, scoring)
            else:
                o = qkv[0].new_empty((0, qkv[0].shape[1], qkv[0].shape[3]))
            self._done.add(layer)
            if len(self._done) == self.num_layers:
                self.complete()
        except BaseException:
            self.abort()
            raise
        return spread(o, step, qkv[0])

    def begin(self, shape: Shape, visible: torch.Tensor | None, scoring: Scoring) -> Step:
        """Begin a forward: the tokens that it adds to each row, and sequences for a new batch."""
        self._undo()
        columns = self._columns_of(shape.rows)
        mask = mask_of(visible, columns, shape.count)
        hidden = hide(columns, mask)
        if hidden is not columns:  # the mask hides the last tokens of rows now
            self.cut(hidden)
        forward = plan(hidden, mask, shape.count)
        if self.columns is None:
            self.start(shape.rows)
        sequences = [self.names[row] for row in forward.rows]
        take = None if forward.take is None else torch.from_numpy(forward.take).to(shape.device)
        step = Step(sequences, forward, take, shape.num_qo_heads, scoring)
        if forward.tokens:
            self.handle = self.road.begin(step)
        self._step = self.latest = step
        return step

    def start(self, rows: int) -> None:
        """Make `rows` empty sequences."""
        self.names += self._made([NewSequence()] * rows)
        self.columns = Columns(np.zeros((rows, 0), np.bool_))

    def _columns_of(self, rows: int) -> Columns:
        """The columns so far; ValueError when the forward has another number of rows."""
        given = self.columns
        if given is not None and len(self.names) != rows and not given.stored.any():
            delete(self.road.control, self.disown())  # the first forward was undone
        if self.columns is None:
            return Columns(np.zeros((rows, 0), np.bool_))
        if len(self.names) != rows:
            raise ValueError(
                f"the forward has {rows} rows and the cache {len(self.names)}: "
                "batch_repeat_interleave(num_beams) makes a row for each beam"
            )
        return self.columns

    def complete(self) -> None:
        """Every layer has attended: the forward counts."""
        step = self._step
        if step is None:
            raise RuntimeError("no forward is under way: this is a bug")
        if step.forward.tokens:
            self.road.end(self.handle)
            self._last = self.handle
        self._before, self.columns = self.columns, step.forward.after
        if self._caller is not None and not self._begun:
            self._begun.append(self._before)
        self._step, self.handle = None, None
        self._done.clear()

    def enter(self, model: object) -> None:
        """A call of the model begins; an interrupted one is undone first.

        Calls of the model's parts inside it are ignored.
        """
        if self._caller in (None, model):
            self._revoke()
            self._caller = model

    def leave(self, model: object, *, failed: bool) -> None:
        """The call has ended: its forward counts, or is undone even where all layers attended."""
        if self._caller is not model:
            return
        if not failed:
            self._caller = None
            self._begun.clear()
            return
        with contextlib.suppress(AttndError, RuntimeError):  # else the next forward does it
            self._revoke()

    def _revoke(self) -> None:
        if self._caller is None:
            return
        self._undo()
        if self._begun:
            self._await_last()
            to = self._begun[0] or Columns(np.zeros((len(self.names), 0), np.bool_))
            self.cut(to)
        self._caller = None
        self._begun.clear()

    def _await_last(self) -> None:
        """Wait for the last forward's end; undo it where it failed."""
        last, self._last = self._last, None
        try:
            if last is not None:
                self.road.wait(last)
        except AttndError:
            self.columns = self._before
            raise

    def abort(self) -> None:
        """After an error: undo the forward. The first error is the one that is raised."""
        with contextlib.suppress(AttndError):
            self._undo()

    def settle(self) -> None:
        """Undo a forward that did not end.

        Raises RuntimeError when closed, and the error with which the last forward failed after its
        last layer; that forward is undone too.
        """
        self._undo()
        self._revoke()
        self._await_last()

    def _undo(self) -> None:
        if self.closed:
            raise RuntimeError("the cache is closed")
        step, handle = self._step, self.handle
        self._step, self.handle = None, None
        self._done.clear()
        if step is not None and step.forward.tokens:
            self.road.undo(handle)

    def cut(self, to: Columns) -> None:
        """Truncate the sequences to these columns."""
        if self.columns is None:
            return
        for name, old, new in zip(self.names, self.columns.lengths, to.lengths, strict=True):
            if new < old:
                self.road.control.truncate(name, int(new))
        self.columns = to

    def select(self, rows: Sequence[int]) -> None:
        """Row i continues row `rows[i]`: the first as its sequence, others as forks of it."""
        self.settle()
        if self.columns is None or list(rows) == list(range(len(self.names))):
            return
        columns = self.columns.select(rows)
        first = {row: place for place, row in reversed(list(enumerate(rows)))}
        forked = [place for place, row in enumerate(rows) if first[row] != place]
        names = [self.names[row] for row in rows]
        for place, fork in zip(forked, self.forks([rows[i] for i in forked]), strict=True):
            names[place] = fork
        dropped = set(self.names) - set(names)
        self.names[:], self.columns = names, columns
        delete(self.road.control, sorted(dropped))

    def forks(self, rows: Sequence[int]) -> list[str]:
        """A fork of each of these rows' sequences; all are made, or none."""
        return self._made([NewSequence(parent=self.names[row]) for row in rows])

    def _made(self, new: list[NewSequence]) -> list[str]:
        if not new:
            return []
        return [made.id for made in self.road.control.create_sequences(new)]

    def disown(self) -> list[str]:
        """Give up the sequences: the caller owns them now."""
        names, self.names[:] = list(self.names), []
        self.columns = None
        return names

    def clear(self) -> None:
        try:
            self.settle()
        finally:
            delete(self.road.control, self.disown())


# Calls of a whole model: one that fails after its last layer's attention is undone too.

WATCHED: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()


def watch(model: Any) -> None:
    """Notify batches of the begin and end of the model's calls over their caches."""
    if isinstance(model, torch.nn.Module) and model not in WATCHED:
        WATCHED.add(model)
        model.register_forward_pre_hook(began, with_kwargs=True)
        model.register_forward_hook(ended, with_kwargs=True, always_call=True)


@outside_graphs
def began(model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Raises ValueError where a call passes a cache with use_cache=False."""
    for batch in batches(args, inputs):
        if inputs.get("use_cache") is False:
            raise ValueError(
                f"use_cache is False and {CACHE} an AttndCache, which stores every token: "
                "leave use_cache at True"
            )
        batch.enter(model)


@outside_graphs
def ended(model: Any, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
    """`output` is None where the forward raised."""
    for batch in batches(args, inputs):
        batch.leave(model, failed=output is None)


def batches(args: tuple[Any, ...], inputs: dict[str, Any]) -> Iterator[Batch]:
    """Of the caches among a call's arguments."""
    for given in (*args, *inputs.values()):
        batch = getattr(given, "batch", None)
        if isinstance(batch, Batch):
            yield batch
