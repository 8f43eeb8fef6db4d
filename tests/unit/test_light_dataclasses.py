"""Light dataclasses against the standard ones: what a user of them can see is the same."""

import contextlib
import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from bootseer import light_dataclasses as light

KINDS = [dataclasses, light]


def point_class(kind):
    @kind.dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2
        note: str = kind.field(default="", repr=False, compare=False)
        tags: list = kind.field(default_factory=list, hash=False)

    return Point


@light.dataclass(frozen=True, slots=True)
class Kept:
    """At module level, as pickle wants it."""

    name: str
    more: tuple = ()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_made_shown_compared_and_hashed(kind):
    point = point_class(kind)
    one = point(1, note="seen")
    assert (one.x, one.y, one.note, one.tags) == (1, 2, "seen", [])
    assert repr(one).endswith("Point(x=1, y=2, tags=[])")
    assert one == point(x=1, y=2) != point(1, 3)
    assert one != (1, 2, "seen", [])
    assert hash(one) == hash(point(1, note="other")) == hash((1, 2))
    assert one.tags is not point(1).tags
    assert point.__match_args__ == ("x", "y", "note", "tags")
    assert not hasattr(one, "__dict__")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "named"),
    [((), {}), ((1, 2, "", [], 5), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((), {"y": 1})],
)
def test_wrong_values_are_refused(kind, values, named):
    with pytest.raises(TypeError):
        point_class(kind)(*values, **named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_one_cannot_be_changed(kind):
    one = point_class(kind)(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 2
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):  # 3.11's says it wrongly
        one.other = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x
    assert one.x == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_not_frozen_changes_and_has_no_hash(kind):
    @kind.dataclass(slots=True)
    class Box:
        held: int = 0

    one = Box()
    one.held = 3
    assert one == Box(3)
    with pytest.raises(AttributeError):
        one.other = 1
    with pytest.raises(TypeError):
        hash(one)


@pytest.mark.parametrize("kind", KINDS)
def test_keywords_only_inheritance_and_what_follows_the_values(kind):
    @kind.dataclass(slots=True)
    class Base:
        a: int
        sum: int = 0

    @kind.dataclass(slots=True, kw_only=True)
    class Child(Base):
        b: int

        def __post_init__(self):
            self.sum = self.a + self.b

    assert Child(1, b=2) == Child(1, 3, b=2)
    assert Child(1, b=2).sum == 3
    with pytest.raises(TypeError):
        Child(1, 0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_itself_alone_is_compared_and_shown_as_any_object(kind):
    @kind.dataclass(slots=True, eq=False, repr=False)
    class Record:
        number: int = 0

    one = Record(1)
    assert one == one != Record(1)
    assert {one: 2}[one] == 2
    assert repr(one).startswith("<")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [lambda cls: cls, light.quickly_made])
def test_one_that_is_made_quickly_is_made_the_same(make, frozen):
    @make
    @light.dataclass(slots=True, frozen=frozen)
    class Base:
        name: str
        tags: list = light.field(default_factory=list)
        lock: object = light.field(default_factory=object)

    @make
    @light.dataclass(slots=True, kw_only=True, frozen=frozen)
    class Child(Base):
        size: int
        note: str = "-"

    one = Child("a", size=3)
    assert (one.name, one.tags, one.size, one.note) == ("a", [], 3, "-")
    assert one.tags is not Child("a", size=3).tags
    assert one.lock is not Child("a", size=3).lock
    assert Child("a", [1], one.lock, size=3, note="").tags == [1]
    assert light.replace(one, size=4) == Child("a", [], one.lock, size=4)
    assert not hasattr(one, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError) if frozen else contextlib.nullcontext():
        one.size = 3
    for values, named in [((), {"size": 1}), (("a",), {}), (("a", [], 1, 2), {})]:
        with pytest.raises(TypeError):
            Child(*values, **named)
    with pytest.raises(TypeError):
        Child("a", size=1, other=2)


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_in_a_class_are_refused(kind):
    with pytest.raises(ValueError, match="default_factory"):

        @kind.dataclass()
        class Shared:
            held: list = []  # noqa: RUF012 - the mistake

    with pytest.raises(TypeError):

        @kind.dataclass()
        class Backwards:
            a: int = 1
            b: int


@pytest.mark.parametrize(
    ("own", "functions"), [(dataclasses, dataclasses), (light, light), (light, dataclasses)]
)
def test_the_functions_of_both_modules_take_both(own, functions):
    point = point_class(own)
    outer = point(1, tags=[point(2), (3, {"k": point(4)})])
    inner = {"x": 2, "y": 2, "note": "", "tags": []}
    told = functions.asdict(outer)
    assert told["tags"] == [inner, (3, {"k": {**inner, "x": 4}})]
    assert functions.replace(outer, x=9) == point(9, tags=outer.tags)
    assert functions.replace(outer, x=9).tags is outer.tags
    with pytest.raises(TypeError):
        functions.replace(outer, z=1)


def test_the_standard_module_knows_them():
    point = point_class(light)
    assert dataclasses.is_dataclass(point)
    assert dataclasses.is_dataclass(point(1))
    theirs = dataclasses.fields(point_class(dataclasses))
    ours = dataclasses.fields(point)
    compared = ("name", "type", "default", "default_factory", "repr", "compare", "kw_only")
    for mine, other in zip(ours, theirs, strict=True):
        assert [getattr(mine, n) for n in compared] == [getattr(other, n) for n in compared]


@pytest.mark.parametrize(
    ("own", "functions"), [(dataclasses, dataclasses), (light, light), (light, dataclasses)]
)
def test_fields_tell_defaults_and_metadata(own, functions):
    @own.dataclass(frozen=True)
    class Setting:
        name: str
        noted: int = own.field(default=1, metadata={"help": "a number"})

    name, noted = functions.fields(Setting)
    assert (name.name, name.default, dict(name.metadata)) == ("name", functions.MISSING, {})
    assert (noted.name, noted.default, dict(noted.metadata)) == ("noted", 1, {"help": "a number"})


def test_copies_and_pickles_are_equal():
    one = Kept("a", (1, 2))
    assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_a_standard_one_within_is_told_too():
    assert light.asdict(Kept("a", (point_class(dataclasses)(1),)))["more"] == (
        {"x": 1, "y": 2, "note": "", "tags": []},
    )


def test_making_a_class_imports_neither_dataclasses_nor_inspect():
    program = """
import sys
from bootseer import light_dataclasses as light
@light.dataclass(frozen=True)
class A:
    x: int = light.field(default=1)
assert light.replace(A(), x=2) == A(2) and light.asdict(A()) == {"x": 1} and repr(A()) and hash(A())
print(sorted({"dataclasses", "inspect"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
