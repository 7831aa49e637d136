"""Linearizability: what callers of a namespace saw is explained by calls that took effect one at a
time, each between its beginning and its end.

A call is an `Effect` on a dictionary of sequences. The history keeps every state that the calls so
far can have led to, with the calls that have taken effect in it and are not yet answered. An answer
leaves the states in which it is right; with the last of them the service was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, product
from math import prod
from typing import Any, Final

from tests.world.calls import Held, Outcome, Sequences, Wrong

MAX_STATES: Final = 20_000
SOME_STATES: Final = 200
FOREVER: Final = float("inf")


class Unclear(Exception):
    """Too much may have happened: the run ends without a result."""


Frozen = tuple[tuple[str, Held], ...]
State = tuple[Frozen, frozenset[tuple[int, Outcome]]]
NOTHING: Final[State] = ((), frozenset())
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
    repeats: bool = False
    """Whether it may act more than once before its answer."""
    step: Any = None
    """What its caller knows of it."""


class Group:
    """Sequences whose states depend on one another, as calls under way are about several of them.

    Those of other groups are apart: otherwise few calls without an answer made too many states.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.states: set[State] = {NOTHING}


class History:
    """The calls of one namespace."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.groups: dict[str, Group] = {}
        """By the name of a sequence."""
        self.pending: dict[int, Effect] = {}
        self.numbers = count(1)
        self.made: dict[str, float] = {}
        """When calls that make a sequence of a name were last answered."""

    def begin(
        self,
        text: str,
        names: Iterable[str],
        apply: Callable[[Sequences, int], Outcome],
        **more: Any,
    ) -> Effect:
        """A call begins; `more` are other fields of its effect."""
        number, every = next(self.numbers), frozenset(names)
        effect = Effect(number, text, every, lambda held: apply(held, number), **more)
        effect.began = self.now()
        self.pending[number] = effect
        self._group(effect)
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
        """The call was answered, and has changed nothing."""
        found: set[State] = set()
        for frozen, done in self._expanded(effect):
            mine = {entry for entry in done if entry[0] == effect.number}
            is_done = not effect.is_read and any(seen[0] in ("ok", "any") for _, seen in mine)
            if not is_done:
                found.add((frozen, done - mine))
        self._keep(found, effect, text)

    def lost(self, effect: Effect, for_s: float) -> None:
        """No answer came: it may take effect for some seconds."""
        effect.ends = self.now() + for_s
        if effect.is_read:
            self._forget(effect)
            return
        group = self._group(effect)
        group.states = {
            (frozen, without(done, effect.number) | {(effect.number, ANY)})
            if any(number == effect.number for number, _ in done)
            else (frozen, done)
            for frozen, done in group.states
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
        states = self.groups[name].states if name in self.groups else {NOTHING}
        return not busy and len({dict(frozen).get(name) for frozen, _ in states}) == 1

    def held(self) -> Sequences:
        """The sequences of one of the states."""
        return {name: held for group in self._all() for name, held in next(iter(group.states))[0]}

    def every_name(self) -> set[str]:
        return {name for group in self._all() for frozen, _ in group.states for name, _ in frozen}

    def _all(self) -> Iterable[Group]:
        return dict.fromkeys(self.groups.values())

    def _group(self, effect: Effect) -> Group:
        """The group of all names of an effect; others join it."""
        known = [name for name in sorted(effect.names) if name in self.groups]
        every = dict.fromkeys(self.groups[name] for name in known)
        if len(every) == 1 and effect.names <= (only := next(iter(every))).names:
            return only
        whole = Group()
        whole.names |= effect.names
        for group in every:
            whole.names |= group.names
            pairs = product(whole.states, group.states)
            whole.states = {(join(one[0], two[0]), one[1] | two[1]) for one, two in pairs}
        self.groups |= dict.fromkeys(whole.names, whole)
        return whole

    def _split(self, group: Group) -> None:
        """The parts of a group that no call under way connects are groups of their own again, where
        their states do not depend on one another, or are too many: then some that cannot be are
        kept as well."""
        near = [one for one in self.pending.values() if one.names & group.names]
        rest, parts = set(group.names), list[tuple[set[str], set[State]]]()
        while rest:
            names = {rest.pop()}
            while more := {name for one in near if one.names & names for name in one.names} - names:
                names |= more
            rest -= names
            numbers = {one.number for one in near if one.names & names}
            states = {
                (
                    tuple(pair for pair in frozen if pair[0] in names),
                    frozenset(entry for entry in done if entry[0] in numbers),
                )
                for frozen, done in group.states
            }
            parts.append((names, states))
        num_states = prod(len(states) for _, states in parts)
        if len(parts) == 1 or num_states > len(group.states) < SOME_STATES:
            return
        for names, states in parts:
            own = Group()
            own.names, own.states = names, states
            self.groups |= dict.fromkeys(names, own)

    def _keep(self, found: set[State], effect: Effect, text: str) -> None:
        group = self._group(effect)
        if not found:
            before = [
                {name: held for name, held in frozen if name in effect.names}
                for frozen, _ in list(group.states)[:3]
            ]
            waiting = [one.text for one in self.pending.values() if one.names & effect.names]
            raise Wrong(f"{text}: not possible after {before}, with {waiting}")
        group.states = found
        self.pending.pop(effect.number, None)
        now = self.now()
        if effect.makes:
            self.made[effect.makes] = now
        self._split(group)
        for one in [one for one in self.pending.values() if one.ends < now]:
            if one.number in self.pending:
                self._forget(one)

    def _forget(self, effect: Effect) -> None:
        """It has taken effect by now, or never will."""
        group = self._group(effect)
        group.states = self._expanded(effect)
        self._end(effect)
        self._split(group)

    def _end(self, effect: Effect) -> None:
        del self.pending[effect.number]
        group = self._group(effect)
        group.states = {(frozen, without(done, effect.number)) for frozen, done in group.states}

    def _expanded(self, effect: Effect) -> set[State]:
        """The states, and all that calls without an answer can have made of them."""
        group = self._group(effect)
        near = [one for one in self.pending.values() if one.names & group.names]
        found, todo = set(group.states), list(group.states)
        while todo:
            frozen, done = todo.pop()
            numbers = {number for number, _ in done}
            for one in near:
                if one.number in numbers and not one.repeats:
                    continue
                held = dict(frozen)
                outcome = one.apply(held)
                if one.ends < FOREVER and outcome[:1] == ("ok",):
                    state = freeze(held), done | {(one.number, ANY)}  # it is answered nowhere
                elif outcome and one.ends == FOREVER:
                    again = one.number in numbers
                    state = freeze(held), done if again else done | {(one.number, outcome)}
                else:
                    continue
                if state not in found:
                    found.add(state)
                    todo.append(state)
            if len(found) > MAX_STATES:
                raise Unclear(f"{len(found)} states: {[one.text for one in near]}")
        return found


def join(first: Frozen, second: Frozen) -> Frozen:
    return tuple(sorted(first + second))


def without(done: frozenset[tuple[int, Outcome]], number: int) -> frozenset[tuple[int, Outcome]]:
    return frozenset(entry for entry in done if entry[0] != number)


def freeze(held: Sequences) -> Frozen:
    return tuple(sorted(held.items()))
