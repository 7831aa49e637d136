"""The engine of a sequence: by its id, or by memory."""

from __future__ import annotations

import re

from service.cluster.routing.tags import Tags, new_id, tag_in, tag_of_instance
from service.operations.schema.fields import ID_PATTERN


def test_a_generated_id_names_its_engine() -> None:
    tag = tag_of_instance("0123456789abcdef0123456789abcdef")
    name = new_id(tag)
    assert tag_in(name) == tag == "01234567"
    assert re.fullmatch(ID_PATTERN, name) and new_id(tag) != name


def test_chosen_ids_without_a_tag_name_no_engine() -> None:
    assert [tag_in(name) for name in ("chat-1", "a.b", "x.0123456", "y.0123456g")] == [None] * 4


def test_the_memory_takes_precedence_over_the_id() -> None:
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


def test_changes_are_counted() -> None:
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


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    names = Tags(most=2)
    for name in ("a", "b", "a", "c"):
        names.learn(("default", name), "aaaaaaaa")
    assert [name for _, name in names.known] == ["a", "c"]
