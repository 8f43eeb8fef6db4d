"""Reads rule files: rules that turn log lines of unmodified programs into phases.

Python 3.9, standard library only. A rule file is an INI file; each section is one rule, `[DEFAULT]`
holds keys for all of them:

    [rendezvous]                 ; the rule's name
    phase = rendezvous           ; the phase; required
    begin = Starting worker      ; regular expressions, searched in the line; several
    end   = Rendezvous complete  ;   alternatives may follow on indented lines of their own
    point = ...                  ; at least one of begin, end, point
    wait  = true                 ; the phase is spent waiting for others
    status = error               ; of the end or point (default ok)
    reason = not the first step  ; what the status means, for people
    once  = true                 ; only a lane's first match of this rule counts
    again = keep | restart       ; begin seen while open: keep the first (default), or close
                                 ;   that span and open another
    unopened = point | ignore    ; end seen without begin: a point that says so (default), or no
                                 ;   event
    until = next | PHASE ...     ; what closes the phase besides its end: the next begin or point
                                 ;   of any other phase, or of the phases named
    time = ^\\[(?P<time>[^]]+)\\]  ; where the line's own timestamp is: group `time`, or the first
    time_format = %Y-%m-%d %H:%M:%S,%f   ; strptime, or iso, unix, unix_ms, unix_us, unix_ns
    time_zone = local | utc | +08:00     ; of timestamps that carry no zone (default local)

    step = GROUP                         ; the group that counts steps: see below
    step_from = 1                        ; the number of a run's very first step (default 1)
    lane = \\[\\S+ \\S+ (?P<lane>TP\\d+)\\]  ; where the line itself names its source: group
                                         ;   `lane`, or the first
    across = true                ; one rank prints the begin and another the end: one span for all
    confirm = ^\\{'loss':                 ; see below

A rule with `step` waits for its first match whose step is `step_from`, or for two matches: their
steps and times give how many steps the log leaves out and how long one takes, and so when the first
step ended. Where the begin has the group too, it gives the number of this run's first step.

A rule with `confirm` has a begin and an end with a group `total` each, for progress bars that only
their totals distinguish. Its span counts once a line matches `confirm` and the next bar after it
has the same total; without confirmation no event is written.

Named groups of the matching expression become attributes: `bytes` is `bootseer.bytes`, `rank` and
`local_rank` name the process that wrote the line, any other NAME is `log.NAME`. `duration` (`1.2s`,
`340ms`, `1m 02s`), `duration_s` and `duration_ms` state how long the phase took, so a single end
line gives a whole span. An end closes its phase, whichever rule opened it. Spans still open when
the log ends stay open: the report shows a phase that was cut off.

Ranks are distinguished by the launchers' prefixes (see `lines.split_line`); each rank has its own
open phases. All is bounded: line length, lanes, events per rule, and (through the `search` function
given to the engine) the time of one match.
"""

from __future__ import annotations

import configparser
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Dict, List, Optional, Pattern, Tuple

RULES_DIRECTORY = os.path.join(os.path.dirname(__file__), "shipped")

REASON_MAX = 200
"""Characters of a rule's reason."""

_KEYS = [
    "phase",
    "begin",
    "end",
    "point",
    "wait",
    "status",
    "reason",
    "once",
    "again",
    "unopened",
    "until",
    "step",
    "step_from",
    "lane",
    "across",
    "confirm",
    "time",
    "time_format",
    "time_zone",
]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_ZONE = re.compile(r"([+-])(\d\d):?(\d\d)")
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class RuleFileError(ValueError):
    """A rule file cannot be used; gives the place: `file`, and section, key and line if known."""

    def __init__(
        self,
        problem: str,
        file: str,
        section: Optional[str] = None,
        key: Optional[str] = None,
        line: Optional[int] = None,
    ) -> None:
        place = file if line is None else f"{file}:{line}"
        within = "".join(
            (f" [{section}]" if section else "", f" {key}" if key else ""),
        )
        super().__init__(f"{place}:{within} {problem}")
        self.problem, self.file, self.section, self.key, self.line = (
            problem,
            file,
            section,
            key,
            line,
        )


@dataclass(frozen=True)
class Rule:
    """One section of a rule file; `until` holds phase names, or `next` alone."""

    name: str
    phase: str
    begin: Tuple[Pattern[str], ...] = ()
    end: Tuple[Pattern[str], ...] = ()
    point: Tuple[Pattern[str], ...] = ()
    wait: bool = False
    status: str = "ok"
    reason: str = ""
    once: bool = False
    restart: bool = False
    unopened_point: bool = True
    until: Tuple[str, ...] = ()
    step: str = ""
    step_from: int = 1
    lane: Optional[Pattern[str]] = None
    across: bool = False
    confirm: Tuple[Pattern[str], ...] = ()
    time: Optional[Pattern[str]] = None
    time_format: str = "iso"
    utc_offset_s: Optional[int] = None

    @cached_property
    def searches(self) -> Tuple[Tuple[str, Tuple[Pattern[str], ...]], ...]:
        """(kind, patterns) in the order of search: a line may end one span and begin the next."""
        kinds = (("end", self.end), ("begin", self.begin), ("point", self.point))
        return tuple((kind, patterns) for kind, patterns in kinds if patterns)


def list_shipped() -> List[str]:
    """Return the names of the rule files that come with bootseer."""
    names = os.listdir(RULES_DIRECTORY)
    return sorted(name[:-4] for name in names if name.endswith(".ini"))


def _resolve_path(name_or_path: str) -> str:
    """Return the path of a rule file; a word without path separator or suffix is a shipped one."""
    if os.sep in name_or_path or "." in name_or_path:
        return name_or_path
    shipped = list_shipped()
    if name_or_path not in shipped:
        known = ", ".join(shipped)
        raise RuleFileError(f"is not a shipped rule set; known: {known}", name_or_path)
    return os.path.join(RULES_DIRECTORY, name_or_path + ".ini")


def load(name_or_path: str) -> List[Rule]:
    """Read a rule file, or a shipped one by its name.

    Raises RuleFileError for bad contents and OSError for a file that cannot be read.
    """
    path = _resolve_path(name_or_path)
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleFileError("is not UTF-8 text", path, line=line) from error
    return parse(text, path)


def parse(text: str, file: str) -> List[Rule]:
    """Return the rules of a file's text, in its order; `file` only names it in errors.

    Raises RuleFileError.
    """
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"), strict=True
    )
    try:
        parser.read_string(text, file)
    except configparser.MissingSectionHeaderError as error:
        raise RuleFileError("text before the first [section]", file, line=error.lineno) from error
    except configparser.DuplicateSectionError as error:
        raise RuleFileError(
            "the section is there twice", file, str(error.section), line=error.lineno
        ) from error
    except configparser.DuplicateOptionError as error:
        raise RuleFileError(
            "the key is there twice", file, error.section, error.option, error.lineno
        ) from error
    except configparser.ParsingError as error:
        line = error.errors[0][0] if error.errors else None
        raise RuleFileError("is neither a section nor `key = value`", file, line=line) from error
    if not parser.sections():
        raise RuleFileError("holds no rule", file)
    line_numbers = _find_line_numbers(text)
    return [
        _SectionReader(parser[name], file, line_numbers).read_rule() for name in parser.sections()
    ]


def _find_line_numbers(text: str) -> Dict[Tuple[str, str], int]:
    """Return the line number of each (section, key); the section itself has key ""."""
    line_numbers: Dict[Tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\[(.+)\]", line)
        if header:
            section = header.group(1)
            line_numbers.setdefault((section, ""), number)
        elif "=" in line and line[:1] not in "#; \t":
            line_numbers.setdefault((section, line.split("=")[0].strip().lower()), number)
    return line_numbers


class _SectionReader:
    """Reads one section into a Rule; its errors name the line of the key."""

    def __init__(
        self,
        section: configparser.SectionProxy,
        file: str,
        line_numbers: Dict[Tuple[str, str], int],
    ) -> None:
        self._section, self._file, self._line_numbers = section, file, line_numbers

    def read_rule(self) -> Rule:
        for key in self._section:
            if key not in _KEYS:
                raise self._make_error(f"is not a key; known: {', '.join(_KEYS)}", key)
        phase = self._section.get("phase")
        if phase is None:
            raise self._make_error("the key `phase` is missing")
        if not _NAME.fullmatch(phase):
            raise self._make_error(f"{phase!r} is not a phase name", "phase")
        begin, end, point = (self._read_patterns(key) for key in ("begin", "end", "point"))
        if not (begin or end or point):
            raise self._make_error("one of the keys begin, end, point must be given")
        return Rule(
            name=self._section.name,
            phase=phase,
            begin=begin,
            end=end,
            point=point,
            wait=self._read_boolean("wait"),
            status=self._read_choice("status", "ok", "error", "fallback"),
            reason=" ".join(self._section.get("reason", "").split())[:REASON_MAX],
            once=self._read_boolean("once"),
            restart=self._read_choice("again", "keep", "restart") == "restart",
            unopened_point=self._read_choice("unopened", "point", "ignore") == "point",
            until=tuple(self._section.get("until", "").split()),
            step=self._read_step_group(end + point),
            step_from=self._read_number("step_from", 1),
            lane=self._read_grouped_pattern("lane"),
            across=self._read_boolean("across"),
            confirm=self._read_confirm(begin, end, point),
            time=self._read_grouped_pattern("time"),
            time_format=self._section.get("time_format", "iso"),
            utc_offset_s=self._read_utc_offset_s(),
        )

    def _make_error(self, problem: str, key: Optional[str] = None) -> RuleFileError:
        name, key_or_section = self._section.name, key or ""
        line = self._line_numbers.get((name, key_or_section))
        line = line or self._line_numbers.get(("DEFAULT", key_or_section))
        return RuleFileError(problem, self._file, name, key, line)

    def _read_patterns(self, key: str) -> Tuple[Pattern[str], ...]:
        lines = self._section.get(key, "").splitlines()
        return tuple(self._compile_pattern(line.strip(), key) for line in lines if line.strip())

    def _compile_pattern(self, expression: str, key: str) -> Pattern[str]:
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._make_error(f"is not a regular expression: {error}", key) from error
        if key != "time" and pattern.search("") is not None:
            raise self._make_error("matches every line; name something of the line", key)
        return pattern

    def _read_boolean(self, key: str) -> bool:
        value = self._section.get(key, "false").lower()
        if value not in _BOOLEANS:
            raise self._make_error(f"must be true or false, not {value!r}", key)
        return _BOOLEANS[value]

    def _read_choice(self, key: str, *choices: str) -> str:
        value = self._section.get(key, choices[0])
        if value not in choices:
            raise self._make_error(f"must be one of {', '.join(choices)}, not {value!r}", key)
        return value

    def _read_step_group(self, patterns: Tuple[Pattern[str], ...]) -> str:
        group = self._section.get("step", "")
        if group and any(group not in pattern.groupindex for pattern in patterns):
            raise self._make_error(f"every end and point needs a group named {group!r}", "step")
        return group

    def _read_number(self, key: str, default: int) -> int:
        value = self._section.get(key, str(default))
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise self._make_error(f"must be a number, not {value!r}", key)
        return int(value)

    def _read_confirm(
        self,
        begin: Tuple[Pattern[str], ...],
        end: Tuple[Pattern[str], ...],
        point: Tuple[Pattern[str], ...],
    ) -> Tuple[Pattern[str], ...]:
        confirm = self._read_patterns("confirm")
        have_totals = all("total" in pattern.groupindex for pattern in begin + end)
        if confirm and not (begin and end and have_totals and not point):
            problem = "goes with begin and end, each with a group named 'total', and no point"
            raise self._make_error(problem, "confirm")
        return confirm

    def _read_grouped_pattern(self, key: str) -> Optional[Pattern[str]]:
        """Return an expression whose value is the group of the key's name, or else the first."""
        expression = self._section.get(key)
        if not expression:
            return None
        pattern = self._compile_pattern(expression, key)
        if not pattern.groups:
            content = "timestamp" if key == "time" else "source's name"
            raise self._make_error(f"needs a group around the {content}", key)
        return pattern

    def _read_utc_offset_s(self) -> Optional[int]:
        """Return the offset of `time_zone` from UTC in seconds; None for this machine's zone."""
        value = self._section.get("time_zone", "local")
        if value in ("local", "utc"):
            return None if value == "local" else 0
        offset = _ZONE.fullmatch(value)
        if offset is None:
            raise self._make_error(f"must be local, utc or ±HH:MM, not {value!r}", "time_zone")
        sign, hours, minutes = offset.groups()
        return int(sign + "1") * (int(hours) * 3600 + int(minutes) * 60)
