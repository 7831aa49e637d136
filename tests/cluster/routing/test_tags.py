"""Where sequences are: what ids tell, and what is remembered."""

from __future__ import annotations

import re

from service.cluster.routing.tags import Tags, new_id, tag_in, tag_of_instance
from service.operations.schema.fields import ID_PATTERN


def test_an_id_that_was_made_tells_its_engine() -> None:
    tag = tag_of_instance("0123456789abcdef0123456789abcdef")
    name = new_id(tag)
    assert tag_in(name) == tag == "01234567"
    assert re.fullmatch(ID_PATTERN, name) and new_id(tag) != name


def test_most_ids_that_callers_choose_tell_nothing() -> None:
    assert [tag_in(name) for name in ("chat-1", "a.b", "x.0123456", "y.0123456g")] == [None] * 4


def test_what_is_remembered_goes_before_what_the_id_tells() -> None:
    names = Tags()
    name = ("default", new_id("aaaaaaaa"))
    names.learn(name, "bbbbbbbb")
    assert names.tag(name) == "bbbbbbbb"
    names.learn(name, "aaaaaaaa")
    assert names.tag(name) == "aaaaaaaa" and not names.known
    assert names.tag(("default", "chat-1")) is None


def test_equal_ids_of_two_namespaces_are_two_sequences() -> None:
    names = Tags()
    names.learn(("red", "chat"), "aaaaaaaa")
    names.learn(("blue", "chat"), "bbbbbbbb")
    names.forget(("red", "chat"))
    assert (names.tag(("red", "chat")), names.tag(("blue", "chat"))) == (None, "bbbbbbbb")


def test_what_becomes_another_thing_is_counted() -> None:
    names = Tags()
    name = ("default", new_id("aaaaaaaa"))
    names.learn(name, "aaaaaaaa")
    names.learn(("default", "chat"), "aaaaaaaa")
    assert names.changes == 0, "nothing was known otherwise"
    names.learn(name, "bbbbbbbb")
    names.learn(name, "aaaaaaaa")
    names.forget(("default", "chat"))
    names.forget(("default", "chat"))
    assert names.changes == 3


def test_the_memory_is_bounded_and_forgets_what_was_learned_first() -> None:
    names = Tags(most=2)
    for name in ("a", "b", "a", "c"):
        names.learn(("default", name), "aaaaaaaa")
    assert [name for _, name in names.known] == ["a", "c"]
