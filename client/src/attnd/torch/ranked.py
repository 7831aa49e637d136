"""`RankedTorchSession`: steps over sequences whose pages are sharded over several engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

import torch

from attnd import NewSequence
from attnd.errors import AttndError, ServiceError, UnknownSequence
from attnd.steps.host import HostArena
from attnd.steps.layout import OfLayers, Tensors
from attnd.steps.slots import Slots
from attnd.steps.step import Step, check_left, layers_left
from attnd.torch.arena import DeviceArena, together
from attnd.torch.merging import merge
from attnd.torch.session import TorchSession


class RankedTorchSession:
    """One `TorchSession` with each engine, by rank: page i of a sequence is at `paths[i mod n]`.

    q, k and v go to all of them; each stores the rows of its own pages and attends them, at the
    same time as the others; their states are merged on the caller's stream. Nothing but entering a
    step waits on the host on CUDA, and a layer may be captured in a CUDA graph, as with one engine.
    The engines' GPUs must be reachable from `device`, best the first engine's own.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 30.0,
        api_key: str | None = None,
        device: torch.device | str | int | None = None,
        arena_bytes: int = 64 * 2**20,
    ) -> None:
        with ExitStack() as opened:
            self.sessions = tuple(
                opened.enter_context(
                    TorchSession(
                        path,
                        timeout=timeout,
                        api_key=api_key,
                        device=device,
                        arena_bytes=arena_bytes,
                    )
                )
                for path in paths
            )
            self._opened = opened.pop_all()

    @property
    def device(self) -> torch.device:
        """The caller's."""
        return self.sessions[0].device

    # Sequences, at all ranks. If one rejects a sequence, it is deleted at the others.

    def create_sequence(self, sequence: str) -> None:
        """An empty sequence."""
        ranks = len(self.sessions)
        self._create([NewSequence(sequence, shard=(rank, ranks)) for rank in range(ranks)])

    def fork(self, parent: str, sequence: str, length: int | None = None) -> None:
        """A sequence with the first `length` tokens of another (None: all), without
        communication between ranks."""
        self._create([NewSequence(sequence, parent, length)] * len(self.sessions))

    def _create(self, new: Sequence[NewSequence]) -> None:
        made: list[TorchSession] = []
        id = new[0].id or ""
        try:
            for session, one in zip(self.sessions, new, strict=True):
                made.append(session)
                session.create_sequences([one])
        except BaseException as error:
            if isinstance(error, ServiceError) or (len(made) == 1 and self._is_elsewhere(id)):
                made.pop()  # this engine made none; after a lost reply it may have
            for session in made:
                with suppress(AttndError):
                    session.delete_sequences([id])
            raise

    def _is_elsewhere(self, id: str) -> bool:
        """Whether engines behind the first have the sequence, from an earlier call then."""
        try:
            self.sessions[-1].get_sequence(id)
        except AttndError as error:
            return not isinstance(error, UnknownSequence)
        return True

    def truncate(self, sequence: str, length: int) -> None:
        """Keep the first `length` tokens of the whole sequence, at every layer and rank."""
        for session in self.sessions:
            session.truncate(sequence, length)

    def delete_sequence(self, sequence: str) -> None:
        """At every rank, also where it is gone at another."""
        with ExitStack() as each:
            for session in reversed(self.sessions):
                each.callback(session.delete_sequence, sequence)

    # Steps.

    def slots(
        self,
        rows: int,
        num_qo_heads: int,
        *,
        dtype: torch.dtype | None = None,
        rotation: int = 1,
        sinks: bool = False,
    ) -> RankedSlots:
        """As `TorchSession.slots`, at every rank; sinks enter once, at the first."""
        options: dict[str, Any] = {"dtype": dtype, "rotation": rotation}
        return RankedSlots(
            tuple(
                session.slots(rows, num_qo_heads, sinks=sinks and rank == 0, **options)
                for rank, session in enumerate(self.sessions)
            )
        )

    def step(
        self, sequences: Sequence[str], slots: RankedSlots, offsets: Sequence[int], **options: Any
    ) -> RankedStep:
        """As `TorchSession.step`, with its `options` except windows and `lse_base`.

        `offsets` are the lengths of the whole sequences before it, over all ranks.
        """
        if unknown := options.keys() & {"window_left", "lse_base"}:
            raise TypeError(f"{sorted(unknown)[0]}: not in steps over several engines")
        steps: list[Step[torch.Tensor]] = []
        try:
            for session, part in zip(self.sessions, slots.parts, strict=True):
                steps.append(session.step(sequences, part, offsets=offsets, **options))
        except BaseException:
            abort(steps)
            raise

        def undo() -> None:
            if options.get("append", True) and options.get("layers") is None:
                for name, length in zip(sequences, offsets, strict=True):
                    self.truncate(name, int(length))

        return RankedStep(steps, slots, undo)

    def close(self) -> None:
        """End all the sessions; steps that are still open are aborted."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankedSlots(OfLayers[torch.Tensor]):
    """Made by `RankedTorchSession.slots`: the caller writes q, k and v once, and reads one o.

    Addresses are the same in every step.
    """

    @torch.inference_mode(False)
    def __init__(self, parts: tuple[Slots[torch.Tensor], ...]) -> None:
        self.parts = parts
        first = parts[0]
        turns = range(len(first.places))
        self._tensors = [
            one._replace(o=torch.zeros_like(one.o), lse=torch.zeros_like(one.lse))
            for one in map(first.tensors, turns)
        ]
        self._inputs = [[inputs(part, turn) for part in parts] for turn in turns]
        self._turns: dict[int, Callable[[int], None]] = {}
        self._merge(0)  # compiles the kernels, which a capture cannot

    @property
    def rows(self) -> int:
        return self.parts[0].rows

    @property
    def sinks(self) -> torch.Tensor:
        return self.parts[0].sinks

    def tensors(self, layer: int) -> Tensors[torch.Tensor]:
        """Has keys and values of all new tokens, whichever rank stores them; `o` and natural
        `lse` are over all ranks."""
        return self._tensors[layer % len(self._tensors)]

    def attend(self, layer: int) -> torch.Tensor:
        """As `Slots.attend`: q, k and v to the other ranks, all of them at once, and their states
        as one. Returns `o(layer)`."""
        self.parts[0].check_gradients(layer)
        given, *others = self._inputs[layer % len(self._inputs)]
        for other in others:
            # a kernel's stores: a copy between GPUs would wait for a copy engine
            torch.add(given, 0, out=other)
        self._hand_over(layer)
        self._merge(layer)
        return self.o(layer)

    def _hand_over(self, layer: int) -> None:
        arenas = [part.arena for part in self.parts]
        host = [arena for arena in arenas if isinstance(arena, HostArena)]
        if host:
            for wait in [arena.begin_layer(layer) for arena in host]:
                wait()
            return
        turn = self._turns.get(layer)
        if turn is None:
            device = [arena for arena in arenas if isinstance(arena, DeviceArena)]
            turn = self._turns[layer] = together(device, layer)
        turn(torch.cuda.current_stream(self.q(layer).device).cuda_stream)

    def _merge(self, layer: int) -> None:
        states = [(part.o(layer), part.lse(layer)) for part in self.parts]
        merge(states, self.o(layer), self.lse(layer))


class RankedStep(OfLayers[torch.Tensor]):
    """Made by `RankedTorchSession.step`; used like a `Step`.

    Entering waits until all engines have accepted the step; if one rejects it, all undo it. A step
    that fails later at one engine leaves lengths that differ; `RankedTorchSession.truncate` repairs
    them.
    """

    def __init__(
        self, steps: Sequence[Step[torch.Tensor]], slots: RankedSlots, undo: Callable[[], None]
    ) -> None:
        """`undo` truncates the sequences to their lengths before the step, at every engine."""
        self._steps, self._undo = tuple(steps), undo
        self.slots = slots
        self.tensors = slots.tensors
        self._left = set(steps[0].layers)

    def attend(self, layer: int) -> torch.Tensor:
        """As `RankedSlots.attend`, for a layer of this step; raises ValueError as `Step.attend`."""
        check_left(layer, self._left)
        self._left.discard(layer)
        return self.slots.attend(layer)

    def release_to_engine(self) -> None:
        """All layers were released by a CUDA graph that was captured over the slots."""
        self._left.clear()

    def __enter__(self) -> Self:
        try:
            for step in self._steps:
                step.__enter__()
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if exc is not None or self._left:
            self.abort()
            if exc is None:
                raise layers_left(self._left)
            return
        for step in self._steps:
            step.release_to_engine()
            step.__exit__(None, None, None)

    def wait(self) -> None:
        """Wait until every engine has finished it; raises the first error."""
        failed: AttndError | None = None
        for step in self._steps:
            try:
                step.wait()
            except AttndError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def abort(self) -> None:
        """Undo the step at every engine, also where it has finished."""
        abort(self._steps)
        if any(step.call.is_done for step in self._steps):
            self._undo()


def abort(steps: Sequence[Step[torch.Tensor]]) -> None:
    """Abort steps that one stream waits for, once all of them are cancelled.

    All are aborted, whatever happens at one of them. Raises the first error.
    """
    for step in steps:
        step.cancel()
    with ExitStack() as each:
        for step in reversed(steps):
            each.callback(step.abort)


def inputs(slots: Slots[torch.Tensor], layer: int) -> torch.Tensor:
    """q, k and v of a layer as one stretch of bits, int32."""
    place = slots.places[layer]
    count = (place["o"] - place["q"]) // torch.int32.itemsize
    return slots.arena.array(place["q"], torch.int32, (count,), None)
