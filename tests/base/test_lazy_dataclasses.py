"""trainkit.base.lazy_dataclasses makes what the standard library's dataclasses make."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.base import lazy_dataclasses
from trainkit.base.lazy_dataclasses import dataclass, field

Decorator = Callable[..., Any]


def shapes(make: Decorator) -> dict[str, Any]:
    """Classes of every kind that the package has."""

    @make(frozen=True)
    class Point:
        x: int
        y: int = 2
        names: list[str] = field(default_factory=list)
        place: str = field(default="here", init=False)
        secret: str = field(default="s", repr=False)
        note: str = field(default="n", compare=False)

    @make(frozen=True)
    class Deep(Point):
        z: float = 0.5
        last: int = field(default=7, kw_only=True)

    @make
    class Open:
        values: tuple[int, ...]
        total: int = field(init=False)

        def __post_init__(self) -> None:
            self.total = sum(self.values)

    @make(frozen=True, kw_only=True)
    class Named:
        b: int = 1
        a: int

    @make(frozen=True)
    class Own:
        self_made: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

        def __hash__(self) -> int:
            return 5

    @make(frozen=True)
    class Empty:
        pass

    return {c.__name__: c for c in (Point, Deep, Open, Named, Own, Empty)}


SEEN: tuple[tuple[str, Callable[[dict[str, Any]], object]], ...] = (
    ("repr", lambda c: repr(c["Point"](1, names=["a"]))),
    ("repr of a subclass", lambda c: repr(c["Deep"](1, z=2, last=3))),
    ("post init", lambda c: repr(c["Open"]((1, 2)))),
    ("by name", lambda c: repr(c["Named"](a=3))),
    ("own methods", lambda c: (repr(c["Own"](1)), c["Own"](1) == c["Own"](2), hash(c["Own"](1)))),
    ("own list each", lambda c: c["Point"](1).names is c["Point"](1).names),
    ("equal", lambda c: (c["Point"](1) == c["Point"](1), c["Point"](1) == c["Point"](2))),
    ("not compared", lambda c: c["Point"](1, note="a") == c["Point"](1, note="b")),
    ("another class", lambda c: c["Deep"](1) == c["Point"](1)),
    ("empty", lambda c: (c["Empty"]() == c["Empty"](), hash(c["Empty"]()) == hash(c["Empty"]()))),
    ("same hash", lambda c: hash(c["Named"](a=3)) == hash(c["Named"](a=3, b=1))),
    ("fields", lambda c: [(f.name, f.init, f.repr) for f in dataclasses.fields(c["Deep"])]),
    ("asdict", lambda c: dataclasses.asdict(c["Deep"](1))),
    ("replace", lambda c: repr(dataclasses.replace(c["Deep"](1), x=4, last=9))),
    ("copied", lambda c: repr(copy.deepcopy(c["Deep"](1, names=["a"])))),
    ("matched", lambda c: c["Point"].__match_args__),
    ("called", lambda c: c["Point"](1).__init__.__qualname__.endswith("Point.__init__")),
    ("never hashed", lambda c: hash(c["Open"]((1,)))),
    ("list in the hash", lambda c: hash(c["Point"](1))),
    ("no value", lambda c: c["Point"]()),
    ("no such name", lambda c: c["Point"](1, q=2)),
    ("too many", lambda c: c["Named"](1)),
    ("not asked for", lambda c: c["Point"](1, place="there")),
    ("set", lambda c: setattr(c["Point"](1), "x", 2)),
    ("deleted", lambda c: delattr(c["Deep"](1), "z")),
    ("left out", lambda c: repr(c["Deep"](1, last=dataclasses.MISSING)) and None),
)


def outcome(look: Callable[[dict[str, Any]], object], classes: dict[str, Any]) -> object:
    """What is seen, or the error with its words."""
    try:
        return look(classes)
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(("name", "look"), SEEN, ids=[name for name, _ in SEEN])
def test_as_the_standard_library(name: str, look: Callable[[dict[str, Any]], object]) -> None:
    """On the first instance of a class as on later ones."""
    theirs = outcome(look, shapes(dataclasses.dataclass))
    ours = shapes(lazy_dataclasses.dataclass)
    assert [outcome(look, ours), outcome(look, ours)] == [theirs, theirs]


@dataclass(frozen=True)
class Sent:
    x: int
    more: tuple[int, ...] = ()


@dataclass
class Loop:
    inside: object = None


def test_an_instance_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Sent(1, (2,)))) == Sent(1, (2,))


def test_an_instance_within_itself_is_shown() -> None:
    loop = Loop()
    loop.inside = loop
    assert repr(loop) == "Loop(inside=...)"


def test_what_a_subclass_without_fields_sets_up_itself() -> None:
    """Its own __init__ calls the first one of its base."""

    class Late(Sent):
        def __init__(self) -> None:
            super().__init__(3)

    assert [Late().x, Late().more, Sent(4).x] == [3, (), 4]


def test_a_frozen_class_of_the_standard_library_does_not_go_on_from_one() -> None:
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(frozen=True)(type("Other", (Sent,), {}))
