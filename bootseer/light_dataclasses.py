"""`dataclass` for what every command imports: the same classes, a thirtieth of the time to make.

The standard module brings `inspect` and its dozen along and compiles up to eight methods a class,
half a millisecond each; a start makes forty classes before it begins. Here all classes share the
same methods. In return an instance takes about 2 µs to make, four times as long: a class of which
a command makes a million is `quickly_made` besides, keeps the standard decorator, or is a
`NamedTuple`.

`dataclass` takes `frozen`, `slots`, `kw_only`, `eq` and `repr`; `field` takes `default`,
`default_factory`, `repr`, `hash`, `compare` and `metadata`; all mean what they mean in the standard
module, whose functions (`fields`, `asdict`, `replace`, `is_dataclass`) take these classes and
instances too. `asdict` here does not copy values that are no container; `fields` gives no types. No
standard dataclass may inherit from one of these.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    Class = TypeVar("Class", bound=type)

_NO_DEFAULT: Any = object()


class _Field:
    """What is known of one field; `default` and `default_factory` may be `_NO_DEFAULT`."""

    __slots__ = (
        *("compare", "default", "default_factory", "hash"),
        *("kw_only", "metadata", "name", "repr"),
    )

    def __init__(
        self,
        name: str,
        default: Any,
        default_factory: Any,
        repr: bool,  # noqa: A002 - as the standard function calls it
        hash: bool,  # noqa: A002 - as the standard function calls it
        compare: bool,
        kw_only: bool = False,
        metadata: Mapping[Any, Any] | None = None,
    ) -> None:
        self.name = name
        self.default = default
        self.default_factory = default_factory
        self.repr = repr
        self.hash = hash
        self.compare = compare
        self.kw_only = kw_only
        self.metadata = metadata or {}

    def of(self, name: str, kw_only: bool) -> _Field:
        """The same of a field that has a name; `field()` itself knows none."""
        known = (self.default, self.default_factory, self.repr, self.hash, self.compare)
        return _Field(name, *known, kw_only, self.metadata)


def _field(
    *,
    default: Any = _NO_DEFAULT,
    default_factory: Any = _NO_DEFAULT,
    repr: bool = True,  # noqa: A002 - as the standard function calls it
    hash: bool | None = None,  # noqa: A002 - as the standard function calls it
    compare: bool = True,
    metadata: Mapping[Any, Any] | None = None,
) -> Any:
    is_hashed = compare if hash is None else hash
    return _Field("", default, default_factory, repr, is_hashed, compare, metadata=metadata)


def _dataclass(
    *,
    frozen: bool = False,
    slots: bool = False,
    kw_only: bool = False,
    eq: bool = True,
    repr: bool = True,  # noqa: A002 - as the standard function calls it
) -> Callable[[type], type]:
    return lambda cls: _make_class(cls, frozen, slots, kw_only, eq, repr)


def _make_class(
    cls: type,
    frozen: bool,
    slots: bool,
    kw_only: bool,
    eq: bool,
    repr: bool,  # noqa: A002 - as the standard function calls it
) -> type:
    inherited = getattr(cls, "_light_fields", {})
    own = _own_fields(cls, kw_only)
    fields: dict[str, _Field] = {**inherited, **own}
    positional = [one for one in fields.values() if not one.kw_only]
    optional = ""
    for one in positional:
        if one.default is not _NO_DEFAULT or one.default_factory is not _NO_DEFAULT:
            optional = one.name
        elif optional:
            raise TypeError(f"{cls.__name__}.{one.name} has no default, and {optional} before it")
    members = dict(cls.__dict__)
    for name in ("__dict__", "__weakref__"):
        members.pop(name, None)
    for one in own.values():
        if slots or one.default is _NO_DEFAULT:
            members.pop(one.name, None)
        else:
            members[one.name] = one.default
    if slots:
        members["__slots__"] = tuple(name for name in own if name not in inherited)
    members["_light_fields"] = fields
    members["_light_positional"] = tuple(one.name for one in positional)
    members["__dataclass_fields__"] = _StandardFields()
    members.setdefault("__match_args__", members["_light_positional"])
    members.setdefault("__init__", _init)
    if repr:
        members.setdefault("__repr__", _repr)
    if eq and "__eq__" not in cls.__dict__:
        _add_comparison(members, frozen)
    if frozen:
        members |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if slots:
            members.setdefault("__getstate__", _getstate)
            members.setdefault("__setstate__", _setstate)
    made = type(cls)(cls.__name__, cls.__bases__, members)
    made.__qualname__ = cls.__qualname__
    return made


def _add_comparison(members: dict[str, Any], frozen: bool) -> None:
    members["__eq__"] = _eq
    # A class with `__eq__` alone has a `__hash__` of None, set by Python.
    if members.get("__hash__") is None:
        members["__hash__"] = _hash if frozen else None


def _own_fields(cls: type, kw_only: bool) -> dict[str, _Field]:
    fields: dict[str, _Field] = {}
    for name, kind in cls.__annotations__.items():
        if str(kind).startswith(("ClassVar", "typing.ClassVar")):
            continue
        given = cls.__dict__.get(name, _NO_DEFAULT)
        if isinstance(given, _Field):
            fields[name] = given.of(name, kw_only)
            continue
        if given is not _NO_DEFAULT and type(given).__hash__ is None:
            raise ValueError(f"{cls.__name__}.{name} needs a default_factory")
        fields[name] = _Field(name, given, _NO_DEFAULT, True, True, True, kw_only)
    return fields


def quickly_made(cls: Class) -> Class:
    """Compile an `__init__` for a class of this module that is made by the thousand.

    That takes 0.1 ms once, and an instance is made as fast as by one written by hand. The class
    has no `__post_init__`.
    """
    described: Any = cls
    store = object.__setattr__
    names: dict[str, Any] = {"__name__": cls.__module__, "_absent": _NO_DEFAULT, "_store": store}
    is_frozen = described.__setattr__ is _refuse_to_set
    parameters = {False: ["self"], True: ["*"]}  # of fields that may be given by place, or not
    lines = []
    for name, one in described._light_fields.items():
        parameter, value = name, name
        if one.default_factory is not _NO_DEFAULT:
            names[f"_make_{name}"] = one.default_factory
            make = {list: "[]", dict: "{}"}.get(one.default_factory, f"_make_{name}()")
            parameter, value = f"{name}=_absent", f"{make} if {name} is _absent else {name}"
        elif one.default is not _NO_DEFAULT:
            names[f"_default_{name}"] = one.default
            parameter = f"{name}=_default_{name}"
        parameters[one.kw_only].append(parameter)
        line = f"_store(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}"
        lines.append(f"    {line}\n")
    head = ", ".join(parameters[False] + (parameters[True] if len(parameters[True]) > 1 else []))
    exec(f"def __init__({head}):\n{''.join(lines)}", names)
    names["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    described.__init__ = names["__init__"]
    return cls


class _StandardFields:
    """`__dataclass_fields__`, by which the standard functions know a dataclass, when asked for."""

    def __get__(self, instance: object, owner: Any) -> dict[str, Any]:
        import dataclasses

        kinds: dict[str, object] = {}
        for cls in reversed(owner.__mro__):
            kinds |= cls.__annotations__ if cls is not object else {}
        described = []
        for one in owner._light_fields.values():
            default = {"default": one.default, "default_factory": one.default_factory}
            given = {name: value for name, value in default.items() if value is not _NO_DEFAULT}
            given |= {"repr": one.repr, "hash": one.hash, "compare": one.compare}
            given |= {"kw_only": one.kw_only, "metadata": one.metadata}
            described.append((one.name, kinds[one.name], dataclasses.field(**given)))
        standard: Any = dataclasses.make_dataclass(owner.__name__, described)
        return dict(standard.__dataclass_fields__)


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    cls = type(self)
    positional = cls._light_positional
    if len(args) > len(positional):
        raise TypeError(f"{cls.__name__}() takes {len(positional)} values, was given {len(args)}")
    store = object.__setattr__
    for name, value in zip(positional, args, strict=False):
        if name in kwargs:
            raise TypeError(f"{cls.__name__}() was given {name!r} twice")
        store(self, name, value)
    given = positional[: len(args)]
    for name, one in cls._light_fields.items():
        if name in given:
            continue
        if name in kwargs:
            value = kwargs.pop(name)
        elif one.default is not _NO_DEFAULT:
            value = one.default
        elif one.default_factory is not _NO_DEFAULT:
            value = one.default_factory()
        else:
            raise TypeError(f"{cls.__name__}() was given no {name!r}")
        store(self, name, value)
    if kwargs:
        raise TypeError(f"{cls.__name__}() has no {next(iter(kwargs))!r}")
    after = getattr(self, "__post_init__", None)
    if after is not None:
        after()


def _repr(self: Any) -> str:
    shown = (one.name for one in self._light_fields.values() if one.repr)
    return f"{type(self).__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"


def _eq(self: Any, other: Any) -> object:
    if type(other) is not type(self):
        return NotImplemented
    compared = [one.name for one in self._light_fields.values() if one.compare]
    mine, theirs = (tuple(getattr(one, name) for name in compared) for one in (self, other))
    return mine == theirs


def _hash(self: Any) -> int:
    return hash(tuple(getattr(self, f.name) for f in self._light_fields.values() if f.hash))


def _refuse_to_set(_self: Any, name: str, _value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self._light_fields]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, value in zip(self._light_fields, state, strict=True):
        object.__setattr__(self, name, value)


def _fields(cls: Any) -> tuple[_Field, ...]:
    return tuple(cls._light_fields.values())


def _replace(instance: Any, /, **changes: Any) -> Any:
    standing = {name: getattr(instance, name) for name in instance._light_fields}
    return type(instance)(**{**standing, **changes})


def _asdict(instance: Any) -> dict[str, Any]:
    return {name: _to_plain(getattr(instance, name)) for name in instance._light_fields}


def _to_plain(value: Any) -> Any:
    if hasattr(type(value), "_light_fields"):
        return _asdict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_plain(one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_to_plain(one) for one in value)
    if isinstance(value, dict):
        return type(value)((_to_plain(name), _to_plain(one)) for name, one in value.items())
    standard = sys.modules.get("dataclasses")
    if standard is not None and hasattr(type(value), "__dataclass_fields__"):
        return standard.asdict(value)
    return value


if TYPE_CHECKING:  # to a type checker they are the standard ones
    from dataclasses import MISSING, asdict, dataclass, field, fields, replace
else:
    asdict, dataclass, field, fields, replace = _asdict, _dataclass, _field, _fields, _replace
    MISSING = _NO_DEFAULT

__all__ = ["MISSING", "asdict", "dataclass", "field", "fields", "quickly_made", "replace"]
