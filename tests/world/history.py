"""Linearizability: what callers of a namespace saw is explained by calls that took effect one at a
time, each between its beginning and its end.

A call is an `Effect` on a dictionary of sequences. The history keeps every state that the calls so
far can have led to, with the calls that have taken effect in it and are not yet answered. An answer
leaves the states in which it is right; with the last of them the service was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

from tests.world.model import Wrong

MAX_STATES: Final = 20_000
FOREVER: Final = float("inf")


class Unclear(Exception):
    """Too much may have happened: the run ends without a result."""


class Held(NamedTuple):
    """A sequence: the number of the effect that made it, and its rows at each layer."""

    made: int
    rows: tuple[tuple[int, ...], ...]


Sequences = dict[str, Held]
Outcome = tuple[Any, ...]
"""What a caller sees: "ok" and a value, or the codes that are right. An empty one: it cannot take
effect now."""
Frozen = tuple[tuple[str, Held], ...]
State = tuple[Frozen, frozenset[tuple[int, Outcome]]]
NOT_NOW: Final[Outcome] = ()
ANY: Final[Outcome] = ("any",)
"""Of an effect that is answered nowhere."""


@dataclass(eq=False, slots=True)
class Effect:
    """A call of these names; `apply` changes the sequences and returns its outcome."""

    number: int
    text: str
    names: frozenset[str]
    apply: Callable[[Sequences], Outcome]
    is_read: bool = False
    makes: str = ""
    """The name of the sequence that it makes."""
    ends: float = FOREVER
    """When an effect without an answer cannot take place any more."""
    began: float = 0.0
    undo: Effect | None = None
    """Of one that makes a sequence: while it is not answered it may be deleted, and made again."""
    undoes: int = 0
    repeats: bool = False
    """Whether it may act more than once before its answer."""


class History:
    """The calls of one namespace."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.states: set[State] = {((), frozenset())}
        self.pending: dict[int, Effect] = {}
        self.numbers = count(1)
        self.made: dict[str, float] = {}
        """When calls that make a sequence of a name were last answered."""

    def begin(
        self,
        text: str,
        names: Iterable[str],
        apply: Callable[[Sequences, int], Outcome],
        *,
        is_read: bool = False,
        makes: str = "",
    ) -> Effect:
        number = next(self.numbers)
        effect = Effect(
            number,
            text,
            frozenset(names),
            lambda held: apply(held, number),
            is_read,
            makes,
            began=self.now(),
        )
        self.pending[number] = effect
        if makes:
            effect.undo = self.begin(f"undo {text}", [makes], partial(unmake, makes, number))
            effect.undo.undoes = number
        return effect

    def answered(self, effect: Effect, is_right: Callable[[Outcome], bool], text: str) -> None:
        """The call was answered; `is_right` says whether for this outcome."""
        found: set[State] = set()
        for frozen, done in self._expanded(effect):
            for entry in done:
                if entry[0] == effect.number:
                    if is_right(entry[1]):
                        found.add((frozen, done - {entry}))
                    break
            else:
                held = dict(frozen)
                outcome = effect.apply(held)
                if outcome and is_right(outcome):
                    found.add((freeze(held), done))
        self._keep(found, effect, text)

    def refused(self, effect: Effect, text: str) -> None:
        """The call was answered, and has changed nothing, or has undone it."""
        found: set[State] = set()
        for frozen, done in self._expanded(effect):
            mine = {entry for entry in done if entry[0] == effect.number}
            is_done = not effect.is_read and any(seen[0] in ("ok", "any") for _, seen in mine)
            if is_done and effect.undo is not None:
                held = dict(frozen).get(effect.makes)  # or others have deleted it
                is_done = held is not None and held.made == effect.number
            if not is_done:
                found.add((frozen, done - mine))
        self._keep(found, effect, text)

    def lost(self, effect: Effect, for_s: float) -> None:
        """No answer came: it may take effect for some seconds."""
        effect.ends = self.now() + for_s
        if effect.undo is not None:
            effect.undo.ends = effect.ends
        if effect.is_read:
            self._forget(effect)
            return
        self.states = {
            (
                frozen,
                frozenset(
                    (number, seen if number != effect.number else ANY) for number, seen in done
                ),
            )
            for frozen, done in self.states
        }

    def is_contended(self, effect: Effect) -> bool:
        """Whether another call made, or may have made, a sequence of the same name meanwhile."""
        others = [one for one in self.pending.values() if one is not effect]
        return self.made.get(effect.makes, -1.0) >= effect.began or any(
            one.makes == effect.makes for one in others
        )

    def is_certain(self, name: str) -> bool:
        """Whether all states have the same rows of a sequence, which no call changes now."""
        busy = any(name in one.names for one in self.pending.values())
        return not busy and len({dict(frozen).get(name) for frozen, _ in self.states}) == 1

    def held(self) -> Sequences:
        """The sequences of one of the states."""
        return dict(next(iter(self.states))[0])

    def every_name(self) -> set[str]:
        return {name for frozen, _ in self.states for name, _ in frozen}

    def _keep(self, found: set[State], effect: Effect, text: str) -> None:
        if not found:
            before = [
                {name: held for name, held in frozen if name in effect.names}
                for frozen, _ in list(self.states)[:3]
            ]
            waiting = [one.text for one in self.pending.values() if one.names & effect.names]
            raise Wrong(f"{text}: not possible after {before}, with {waiting}")
        self.states = found
        self.pending.pop(effect.number, None)
        if effect.undo is not None:
            self._end(effect.undo)
        now = self.now()
        if effect.makes:
            self.made[effect.makes] = now
        for one in [one for one in self.pending.values() if one.ends < now]:
            if one.number in self.pending:
                self._forget(one)

    def _forget(self, effect: Effect) -> None:
        """It has taken effect by now, or never will."""
        self.states = self._expanded(effect)
        self._end(effect)

    def _end(self, effect: Effect) -> None:
        del self.pending[effect.number]
        self.states = {(frozen, without(done, effect.number)) for frozen, done in self.states}

    def _expanded(self, effect: Effect) -> set[State]:
        """The states, and all that calls without an answer can have made of them, which are about
        the names of `effect` or of such a call."""
        names, others = set(effect.names), [*self.pending.values()]
        others.remove(effect)
        near: list[Effect] = []
        while more := [one for one in others if one.names & names]:
            near += more
            others = [one for one in others if one not in more]
            names.update(*(one.names for one in more))
        near.append(effect)
        found, todo = set(self.states), list(self.states)
        while todo:
            frozen, done = todo.pop()
            numbers = {number for number, _ in done}
            for one in near:
                if one.number in numbers and not one.repeats:
                    continue
                held = dict(frozen)
                outcome = one.apply(held)
                if one.undoes:
                    if (
                        outcome
                        and (state := (freeze(held), without(done, one.undoes))) not in found
                    ):
                        found.add(state)
                        todo.append(state)
                    continue
                if one.ends < FOREVER and outcome[:1] == ("ok",):
                    outcome = ANY  # it is answered nowhere
                elif not outcome or one.ends < FOREVER:
                    continue
                again = one.number in numbers
                state = freeze(held), done if again else done | {(one.number, outcome)}
                if state not in found:
                    found.add(state)
                    todo.append(state)
            if len(found) > MAX_STATES:
                raise Unclear(f"{len(found)} states: {[one.text for one in near]}")
        return found


def without(done: frozenset[tuple[int, Outcome]], number: int) -> frozenset[tuple[int, Outcome]]:
    return frozenset(entry for entry in done if entry[0] != number)


def unmake(name: str, number: int, held: Sequences, _: int) -> Outcome:
    """A door deletes a sequence that it has made, since it cannot keep it."""
    if name not in held or held[name].made != number:
        return NOT_NOW
    del held[name]
    return ("ok",)


def freeze(held: Sequences) -> Frozen:
    return tuple(sorted(held.items()))
