"""Linearizability: calls took effect one at a time, each between its beginning and its end.

The history keeps every state that the calls so far can have led to, with the calls that have taken
effect in it and are not yet answered. An answer leaves the states in which it is right; none: the
service was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import count, product
from math import prod
from typing import Any, Final

from tests.world.network import NEVER, Clock
from tests.world.oracle.calls import ENDING, NOT_NOW, Held, Outcome, Sequences, Step, Wrong

MAX_STATES: Final = 20_000
SOME_STATES: Final = 200


class Unclear(Exception):
    """Too much may have happened: the run ends without a result."""


Frozen = tuple[tuple[str, Held], ...]
Done = frozenset[tuple[int, Outcome]]  # numbers and outcomes of effects that have taken place
State = tuple[Frozen, Done]
NOTHING: Final[State] = ((), frozenset())
ANY: Final[Outcome] = ("any",)  # of an effect that is answered nowhere


class Effect:
    """What a call under way does with one sequence."""

    def __init__(self, number: int, step: Step, began: float, repeats: bool) -> None:
        """`repeats`: whether it may act more than once before its answer."""
        op = step.op
        self.number, self.step, self.began, self.repeats = number, step, began, repeats
        self.names = frozenset(step.names)
        self.makes = step.name if op.made else ""
        self.is_read = not (op.made or op.rows or op.name in (*ENDING, "truncate"))
        self.ends = NEVER  # when it cannot take place any more, without an answer


class Group:
    """Sequences whose states depend on one another, as calls are about several of them. Together,
    all groups would have too many states."""

    def __init__(self, names: Iterable[str], states: set[State]) -> None:
        self.names, self.states = set(names), states


class History:
    """The calls of one namespace, and what its callers know of it."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.leases: dict[str, None] = {}
        self.keys, self.pins = {}, set()
        self.groups: dict[str, Group] = {}  # by the name of a sequence
        self.pending: dict[int, Effect] = {}
        self.numbers = count(1)
        self.made: dict[str, float] = {}  # when calls that make a name were last answered

    def begin(self, step: Step, repeats: bool = False) -> Effect:
        effect = Effect(next(self.numbers), step, self.clock.now, repeats)
        self.pending[effect.number] = effect
        self._group(effect)
        return effect

    def answered(self, effect: Effect, is_right: Callable[[Outcome], bool], text: str) -> None:
        """The call was answered; `is_right` says whether for this outcome."""
        found: set[State] = set()
        for frozen, done in self._expanded(effect):
            if (seen := dict(done).get(effect.number)) is None:
                held = dict(frozen)
                seen = effect.step.apply(held, effect.number)
                frozen = freeze(held)
            if seen and is_right(seen):
                found.add((frozen, without(done, effect)))
        self._keep(found, effect, text)

    def refused(self, effect: Effect, text: str) -> None:
        """The call was answered, and has changed nothing."""
        found: set[State] = set()
        for frozen, done in self._expanded(effect):
            seen = dict(done).get(effect.number, NOT_NOW)
            if effect.is_read or seen[:1] not in (("ok",), ANY):
                found.add((frozen, without(done, effect)))
        self._keep(found, effect, text)

    def lost(self, effect: Effect, for_s: float) -> None:
        """No answer came: it may take effect for some seconds."""
        effect.ends = self.clock.now + for_s
        if effect.is_read:
            self._forget(effect)
            return
        group = self._group(effect)
        group.states = {
            (frozen, frozenset((one, ANY if one == effect.number else seen) for one, seen in done))
            for frozen, done in group.states
        }

    def is_contended(self, effect: Effect) -> bool:
        """Whether another call made, or may have made, a sequence of the same name meanwhile."""
        makers = [one for one in self.pending.values() if one.makes == effect.makes]
        return makers != [effect] or self.made.get(effect.makes, -1.0) >= effect.began

    def is_certain(self, name: str) -> bool:
        """Whether all states have the same rows of a sequence, which no call changes now."""
        busy = any(name in one.names for one in self.pending.values())
        states = self.groups[name].states if name in self.groups else {NOTHING}
        return not busy and len({dict(frozen).get(name) for frozen, _ in states}) == 1

    @property
    def held(self) -> Sequences:
        """The sequences of one of the states."""
        groups = dict.fromkeys(self.groups.values())
        return {name: held for group in groups for name, held in next(iter(group.states))[0]}

    def every_name(self) -> set[str]:
        every = (frozen for group in self.groups.values() for frozen, _ in group.states)
        return {name for frozen in every for name, _ in frozen}

    def _group(self, effect: Effect) -> Group:
        """The group of all names of an effect; others join it."""
        known = [name for name in sorted(effect.names) if name in self.groups]
        every = dict.fromkeys(self.groups[name] for name in known)
        if len(every) == 1 and effect.names <= (only := next(iter(every))).names:
            return only
        whole = Group(effect.names, {NOTHING})
        for group in every:
            whole.names |= group.names
            pairs = product(whole.states, group.states)
            whole.states = {(tuple(sorted(one[0] + two[0])), one[1] | two[1]) for one, two in pairs}
        self.groups |= dict.fromkeys(whole.names, whole)
        return whole

    def _near(self, names: set[str]) -> list[Effect]:
        return [one for one in self.pending.values() if one.names & names]

    def _split(self, group: Group) -> None:
        """The parts of a group that no call under way connects are groups of their own again, where
        their states do not depend on one another, or are too many: then some that cannot be are
        kept as well."""
        near, rest, parts = self._near(group.names), set(group.names), list[Group]()
        while rest:
            names = {rest.pop()}
            while more := {name for one in near if one.names & names for name in one.names} - names:
                names |= more
            rest -= names
            numbers = {one.number for one in near if one.names & names}
            states = {(of(one, names), frozenset(of(done, numbers))) for one, done in group.states}
            parts.append(Group(names, states))
        num_states = prod(len(part.states) for part in parts)
        if len(parts) == 1 or num_states > len(group.states) < SOME_STATES:
            return
        for part in parts:
            self.groups |= dict.fromkeys(part.names, part)

    def _keep(self, found: set[State], effect: Effect, text: str) -> None:
        group = self._group(effect)
        if not found:
            before = [dict(of(frozen, effect.names)) for frozen, _ in list(group.states)[:3]]
            waiting = [one.step.text for one in self._near(set(effect.names))]
            raise Wrong(f"{text}: not possible after {before}, with {waiting}")
        group.states = found
        self.pending.pop(effect.number, None)
        if effect.makes:
            self.made[effect.makes] = self.clock.now
        self._split(group)
        for one in [one for one in self.pending.values() if one.ends < self.clock.now]:
            self._forget(one)

    def _forget(self, effect: Effect) -> None:
        """It has taken effect by now, or never will."""
        group, states = self._group(effect), self._expanded(effect)
        del self.pending[effect.number]
        group.states = {(frozen, without(done, effect)) for frozen, done in states}
        self._split(group)

    def _expanded(self, effect: Effect) -> set[State]:
        """The states, and all that calls without an answer can have made of them."""
        group = self._group(effect)
        near = self._near(group.names)
        found, todo = set(group.states), list(group.states)
        while todo:
            frozen, done = todo.pop()
            numbers = {number for number, _ in done}
            for one in near:
                if one.number in numbers and not one.repeats:
                    continue
                held = dict(frozen)
                outcome = one.step.apply(held, one.number)
                if one.ends < NEVER and outcome[:1] == ("ok",):
                    state = freeze(held), done | {(one.number, ANY)}
                elif outcome and one.ends == NEVER:
                    again = one.number in numbers
                    state = freeze(held), done if again else done | {(one.number, outcome)}
                else:
                    continue
                if state not in found:
                    found.add(state)
                    todo.append(state)
            if len(found) > MAX_STATES:
                raise Unclear(f"{len(found)} states: {[one.step.text for one in near]}")
        return found


def of(entries: Iterable[tuple[Any, Any]], keys: Set[Any]) -> tuple[Any, ...]:
    return tuple(entry for entry in entries if entry[0] in keys)


def without(done: Done, effect: Effect) -> Done:
    return frozenset(entry for entry in done if entry[0] != effect.number)


def freeze(held: Sequences) -> Frozen:
    return tuple(sorted(held.items()))
