"""The invariants of named nodes: their names, who holds them, and their states."""

from __future__ import annotations

from service.core.errors import IntegrityError
from service.core.pool.eviction_order import OUT
from service.core.prefix.named_pages import NamedPages
from service.core.prefix.nodes import CACHED, PINNED, REFERENCED, Name, Node, named


def check_named(node: Node, books: NamedPages) -> None:
    """One node with a name against its books, its children and the node above it."""
    name = named(node)
    where = f"the named node of pages {node.start} to {node.end} of its path"
    if node.pages.size == 0 or (books.node_of[node.pages] != name.number).any():
        raise IntegrityError(f"{where} holds pages that are not known as its own")
    _check_place(node, name, books, where)
    live = [child for child in node.children if _is_live(child)]
    pinned = [child for child in (name.kids or {}).values() if named(child).pins]
    if name.refs + name.pins != len(live) + len(pinned) + name.own or name.refs < len(live):
        raise IntegrityError(
            f"{where} has {name.refs} holders and {name.pins} pins, with {len(live)} children "
            f"held, {len(pinned)} pinned, and {name.own} of its own"
        )
    state = REFERENCED if name.refs else PINNED if name.pins else CACHED
    if books.states[name.number] != name.state:
        raise IntegrityError(f"{where} is in state {name.state}, the books say another")
    if name.state != state or (name.place != OUT) != (state == CACHED):
        raise IntegrityError(f"{where} is in state {name.state}, place {name.place}, not {state}")


def _is_live(child: object) -> bool:
    return not isinstance(child, Node) or child.name is None or child.name.refs > 0


def _check_place(node: Node, name: Name, books: NamedPages, where: str) -> None:
    """It hangs where its key says, under nodes with names."""
    above = 0 if node.parent is None else node.parent.end
    if node.start != above or books.nodes[name.number] is not node:
        raise IntegrityError(f"{where} starts after {above}, or another has its number")
    if node.parent is not None and (node.parent.name is None or node not in node.parent.children):
        raise IntegrityError(f"{where} hangs under a node that does not know it")
    kids = name.root.kids if node.parent is None else named(node.parent).kids
    if kids is None or kids.get(books.first_key(node)) is not node:
        raise IntegrityError(f"{where} is not found by its key")
    if name.root.namespace.roots.get(name.root.cache_salt) is not name.root:
        raise IntegrityError(f"{where} hangs under a root that is gone")
    if any(child not in node.children for child in (name.kids or {}).values()):
        raise IntegrityError(f"{where} finds a child that hangs elsewhere")
