"""Elements of HTML; all text is escaped unless it is marked as HTML already (pure)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from bootseer.profiler.render.wording import GAP, printable

MAX_ROWS = 25
"""Longest list shown; entries left out are counted, and are in the JSON report."""

SHORT_NAME, LONG_NAME = 24, 40


class Markup(str):
    """Text that is HTML already; any other text is escaped when it becomes a child."""

    __slots__ = ()


Child = str | Markup | None | Iterable["Child"]
VOID = frozenset(("meta", "link", "input"))
EMPTY_SVG = frozenset(("rect", "line"))


@dataclass(frozen=True, slots=True)
class Nothing:
    """Why a section has nothing to show, in a sentence."""

    sentence: str


def text(value: str) -> Markup:
    """Text from anywhere, escaped, with control characters made visible."""
    return Markup(escape(printable(value), quote=True))


def name(value: str, *, keep: int = SHORT_NAME) -> Markup:
    """A name that may break after its separators when longer than `keep` characters; a very
    long one breaks anywhere."""
    if len(value) <= keep:
        return tag("span", value, class_="name short")
    parts = re.split(r"(?<=[-._/:])", printable(value))
    broken = Markup(Markup("<wbr>").join(text(part) for part in parts))
    return tag("span", broken, class_="name long" if len(value) > LONG_NAME else "name")


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other; None is nothing."""
    out: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            out.append(child)
        elif isinstance(child, str):
            out.append(text(child))
        else:
            out.append(join(child))
    return Markup("".join(out))


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """One element. `class_` is class, other underscores become hyphens; False and None = absent."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = "class" if key == "class_" else key.replace("_", "-")
        parts.append(attribute if value is True else f'{attribute}="{text(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    if name in VOID:
        return Markup(opening)
    if name in EMPTY_SVG:
        return Markup(f"{opening[:-1]}/>")
    return Markup(f"{opening}{join(children)}</{name}>")


def script_json(value: object) -> Markup:
    """JSON for a data block: nothing in it can close the element or start a comment."""
    plain = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return Markup(plain)


def source_hash(source: str) -> str:
    """The CSP source expression that allows exactly this inline text."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def pct(share: float) -> str:
    """A share (0 to 1) as an SVG percentage, clipped to its bounds."""
    return f"{max(0.0, min(1.0, share)) * 100:.3f}".rstrip("0").rstrip(".") + "%"


def bar(begin: float, end: float, kind: str, *, y: int = 3, height: int = 16) -> Markup:
    """A rectangle from `begin` to `end` (shares of the width) in the look of `kind`: own work,
    waiting (hatched), gap (outlined), span, before or after. Never thinner than can be seen."""
    width = max(end - begin, 0.0025)
    fill = "url(#hatch)" if kind.startswith("wait") else None
    return tag(
        "rect",
        x=pct(min(begin, 1 - width)),
        y=y,
        width=pct(width),
        height=height,
        rx=2,
        class_=f"b-{kind}",
        fill=fill,
    )


def drawing(*children: Child, height: int = 22, class_: str = "track") -> Markup:
    """A decorative SVG as wide as its container; the cells next to it say the same in words."""
    return tag(
        "svg",
        *children,
        class_=class_,
        width="100%",
        height=height,
        aria_hidden="true",
        focusable="false",
    )


def table(
    caption: str,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Child]],
    *,
    class_: str = "",
    header: Iterable[Child] | None = None,
) -> Markup:
    """A table in a region that scrolls by itself and takes the keyboard's focus.

    A column is (title, class), class `n` for figures, `g` for drawings; the first cell of a row
    is its header. `header` replaces the cells that are made of the columns' titles.
    """
    if header is None:
        header = (tag("th", title, scope="col", class_=css or None) for title, css in columns)
    body = []
    for row in rows:
        first = name(row[0]) if type(row[0]) is str else row[0]
        cells = [tag("th", first, scope="row", class_=columns[0][1] or None)]
        cells += [
            tag("td", cell, class_=css or None)
            for cell, (_, css) in zip(row[1:], columns[1:], strict=True)
        ]
        body.append(tag("tr", cells))
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", header)),
            tag("tbody", body),
            class_=class_ or None,
        ),
        class_="scroll",
        role="region",
        tabindex=0,
        aria_label=caption,
    )


def screen_reader_text(value: str) -> Markup:
    """Text for screen readers only."""
    return tag("span", value, class_="sr")


def rest(total: int, what: str = "rows") -> Markup | None:
    """How many entries a capped list of `total` left out; None where it has all."""
    if total <= MAX_ROWS:
        return None
    return tag("p", f"{total - MAX_ROWS:,} more {what} are in the JSON report.", class_="hint")


def legend() -> Markup:
    """What the three looks of a bar mean."""

    def key(kind: str, name: str) -> Markup:
        swatch = tag(
            "svg", bar(0, 1, kind, y=1, height=10),
            width=16, height=12, aria_hidden="true", focusable="false",
        )  # fmt: skip
        return tag("li", swatch, name)

    return tag(
        "ul",
        key("own", "own work"),
        key("wait", "waiting for others"),
        key("gap", GAP),
        class_="legend",
    )
