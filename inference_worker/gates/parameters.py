"""The parameters of a gate or a merge policy, as a JSON document has them: native values or text. Pure.

What is wrong is noted and reading goes on, so that everything comes to light at once. Every problem says where, what is
there and what is accepted. Not here: which parameters a gate has; each gate's file reads its own.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeVar, cast

from inference_worker.errors import ConfigurationError

T = TypeVar("T")
Word = TypeVar("Word", bound=str)

LONGEST_SHOWN: Final = 60
GATE_KEYS: Final = ("gate_type", "gate_params")
DURATION: Final = 'a duration such as "500ms", "90s" or "1m30s"'

_USER: Final = re.compile(r'://[^\s"]*@')

_UNITS_S: Final = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE: Final = re.compile(r"[+-]?\d+", re.ASCII)


class Parameters:
    """An object of parameters, read one by one. A missing, null or empty one has its default; without one it is needed.

    Where something is wrong, the default (or something harmless) is handed back, and `problems` says so.
    """

    def __init__(self, given: object, where: str, problems: list[str] | None = None) -> None:
        self.where = where
        """Its place in the document, such as `pools[0].gate_params`."""
        self.problems: list[str] = [] if problems is None else problems
        """One line each; nested parameters share it."""
        self._asked: set[str] = set()
        self._given: Mapping[str, object] = {}
        if not _nothing(given):
            read = _object(given)
            if read is None:
                self.problems.append(f"{where}: is {shown(given)}; accepted: an object, or its JSON as text")
            else:
                self._given = read

    def has(self, name: str) -> bool:
        """Whether there is one that says anything."""
        self._asked.add(name)
        return not _nothing(self._given.get(name))

    def text(self, name: str, default: str | None = None) -> str:
        """A text; numbers and truth values are written as JSON writes them. Never shown, since it may hold a secret."""
        return self._read(name, default, "", "a text", _text, secret=True)

    def text_or_off(self, name: str, default: str) -> str:
        """A text where an empty one means something: switched off."""
        value = self.text(name, default)
        return "" if self._given.get(name) == "" else value

    def choice(
        self,
        name: str,
        accepted: Sequence[Word],
        default: Word | None = None,
        *,
        more: Callable[[], Sequence[Word]] | None = None,
    ) -> Word:
        """One of a few words; `more` has others, and is asked only where it is none of those."""
        if more is not None and self.has(name) and self._given[name] not in accepted:
            accepted = (*accepted, *more())

        def one(value: object) -> Word | None:
            return next((word for word in accepted if word == value), None)

        return self._read(name, default, accepted[0], " or ".join(f'"{word}"' for word in accepted), one)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
    ) -> float:
        """A finite number within bounds."""
        said = _bounds("a number", at_least=at_least, above=above, at_most=at_most, below=below)

        def within(value: object) -> float | None:
            number = _number(value)
            if number is None:
                return None
            fits = (
                (at_least is None or number >= at_least)
                and (above is None or number > above)
                and (at_most is None or number <= at_most)
                and (below is None or number < below)
            )
            return number if fits else None

        return self._read(name, default, 1.0, said, within)

    def whole(
        self, name: str, default: int | None = None, *, at_least: int | None = None, at_most: int | None = None
    ) -> int:
        """A whole number within bounds; 2.0 is one, 1.5 is none."""
        said = _bounds("a whole number", at_least=at_least, at_most=at_most)

        def within(value: object) -> int | None:
            number = _integer(value)
            fits = (
                number is not None
                and (at_least is None or number >= at_least)
                and (at_most is None or number <= at_most)
            )
            return number if fits else None

        return self._read(name, default, 1 if at_least is None else at_least, said, within)

    def switch(self, name: str, default: bool | None = None) -> bool:
        """true or false."""

        def truth(value: object) -> bool | None:
            return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())

        return self._read(name, default, False, "true or false", truth)

    def seconds(
        self, name: str, default: float | None = None, *, at_least: float | None = None, above: float | None = None
    ) -> float:
        """A duration as Go writes it (`1m30s`), in seconds."""

        def within(value: object) -> float | None:
            lasts_s = _duration_s(value)
            fits = lasts_s is not None and (at_least is None or lasts_s >= at_least)
            return lasts_s if fits and (above is None or lasts_s is None or lasts_s > above) else None

        return self._read(name, default, 1.0, _bounds(DURATION, at_least=at_least, above=above, unit=" s"), within)

    def texts(self, name: str) -> dict[str, str]:
        """A map of texts: an object, or its JSON as text. Empty where it is missing."""

        def pairs(value: object) -> dict[str, str] | None:
            read = _object(value)
            if read is None:
                return None
            made = {key: _text(item) for key, item in read.items()}
            return None if None in made.values() else cast("dict[str, str]", made)

        return self._read(name, {}, {}, "an object of texts, or its JSON as text", pairs)

    def words(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of texts that are not empty, or one text with commas. Without a default at least one is needed."""

        def several(value: object) -> tuple[str, ...] | None:
            read = value.split(",") if isinstance(value, str) else value
            if not isinstance(read, list | tuple) or not read:
                return None
            made = tuple(item.strip() for item in read if isinstance(item, str) and item.strip())
            return made if len(made) == len(read) else None

        nothing: tuple[str, ...] = ()
        given = None if default is None else tuple(default)
        return self._read(name, given, nothing, "a list of texts, or one with commas", several)

    def inner(self, name: str) -> "Parameters":
        """Nested parameters: an object, or its JSON as text. Empty where they are missing."""
        self._asked.add(name)
        return Parameters(self._given.get(name), f"{self.where}.{name}", self.problems)

    def gate(self, name: str) -> "GateSpec | None":
        """A nested gate, which is needed: an object with `gate_type` and `gate_params`, or its JSON as text."""
        said = 'an object such as {"gate_type": "constant", "gate_params": {}}, or its JSON as text'
        found = self._read(name, None, None, said, _object)
        return None if found is None else gate_spec(found, f"{self.where}.{name}", self.problems)

    def gates(self, name: str) -> "tuple[GateSpec, ...]":
        """A list of nested gates, which is needed and may be empty."""
        nothing: Sequence[object] = ()
        found = self._read(name, None, nothing, "a list of gates, or its JSON as text", _list)
        specs = (
            gate_spec(item, f"{self.where}.{name}[{position}]", self.problems) for position, item in enumerate(found)
        )
        return tuple(spec for spec in specs if spec is not None)

    def rest(self) -> dict[str, object]:
        """What nobody has asked for, to be read by somebody else."""
        left = {name: value for name, value in self._given.items() if name not in self._asked}
        self._asked.update(left)
        return left

    def finish(self) -> None:
        """Note the names that nobody has asked for: call it when all were read."""
        for name in self._given:
            if name not in self._asked:
                accepted = ", ".join(sorted(self._asked)) or "none"
                self.problems.append(f"{self.where}.{name}: is not a parameter; accepted: {accepted}")

    def wrong(self, name: str, accepted: str) -> None:
        """Note a problem that only the reader can see."""
        self.problems.append(f"{self.where}.{name}: is {shown(self._given.get(name))}; accepted: {accepted}")

    def raise_problems(self) -> None:
        """Raises: ConfigurationError, with all of them, where there are any."""
        if self.problems:
            raise ConfigurationError(tuple(self.problems))

    def _read(
        self,
        name: str,
        default: T | None,
        harmless: T,
        accepted: str,
        cast_to: Callable[[object], T | None],
        *,
        secret: bool = False,
    ) -> T:
        if not self.has(name):
            if default is None:
                self.problems.append(f"{self.where}.{name}: is missing; accepted: {accepted}")
            return harmless if default is None else default
        value = cast_to(self._given[name])
        if value is not None:
            return value
        there = f"is {_kind(self._given[name])}" if secret else f"is {shown(self._given[name])}"
        self.problems.append(f"{self.where}.{name}: {there}; accepted: {accepted}")
        return harmless if default is None else default


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """A gate as a document names it."""

    gate_type: str
    """Empty where the document leaves it out: no gate."""
    given: Parameters
    where: str
    """Its place in the document, for problems with its type."""


def gate_spec(given: object, where: str, problems: list[str]) -> GateSpec | None:
    """A gate of an object with `gate_type` and `gate_params`; None where it is no such object, which is noted."""
    read = _object(given)
    if read is None:
        problems.append(f"{where}: is {shown(given)}; accepted: an object with {' and '.join(GATE_KEYS)}")
        return None
    problems.extend(
        f"{where}.{name}: is not a part of a gate; accepted: {', '.join(GATE_KEYS)}"
        for name in read
        if name not in GATE_KEYS
    )
    gate_type = read.get("gate_type")
    if not isinstance(gate_type, str) or not gate_type:
        there = "is missing" if _nothing(gate_type) else f"is {shown(gate_type)}"
        problems.append(f"{where}.gate_type: {there}; accepted: the name of a gate type")
        return None
    return GateSpec(
        gate_type=gate_type,
        given=Parameters(read.get("gate_params"), f"{where}.gate_params", problems),
        where=where,
    )


def shown(value: object) -> str:
    """A value as JSON, cut short, and a URL in it without its user: what stands in a wrong place may be a secret."""
    try:
        # Half a character, which JSON can name, could not be printed.
        text = json.dumps(value, ensure_ascii=False, default=repr).encode(errors="backslashreplace").decode()
    except RecursionError:  # It could be read, with fewer calls around it.
        return "nested too deep"
    text = _USER.sub("://***@", text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _nothing(value: object) -> bool:
    return value is None or value == ""


def _kind(value: object) -> str:
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "of no use"


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value) if isinstance(value, str | int) else None


def _number(value: object) -> float | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(value: object) -> int | None:
    if isinstance(value, str):
        # A bound on the digits: Python refuses to read thousands of them, and nothing here counts that far.
        return int(value) if _WHOLE.fullmatch(value) and len(value) <= LONGEST_SHOWN else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _duration_s(value: object) -> float | None:
    """Seconds of `1m30s`; a number without a unit is only good as 0."""
    text = _text(value) if not isinstance(value, bool) else None
    if text is None or len(text) > LONGEST_SHOWN:
        return None
    sign, unsigned = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if unsigned == "0":
        return 0.0
    parts = list(_PART.finditer(unsigned))
    if not parts or "".join(part[0] for part in parts) != unsigned:
        return None
    return float(sign * sum(Decimal(part[1]) * _UNITS_S[part[2]] for part in parts))


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return cast("object", json.loads(value))
    except (ValueError, RecursionError):
        return None


def _object(value: object) -> Mapping[str, object] | None:
    read = _decoded(value)
    return cast("Mapping[str, object]", read) if isinstance(read, Mapping) else None


def _list(value: object) -> Sequence[object] | None:
    read = _decoded(value)
    return cast("Sequence[object]", read) if isinstance(read, list | tuple) else None


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _bounds(said: str, *, unit: str = "", **bounds: float | None) -> str:
    given = (f"{name.replace('_', ' ')} {_plain(bound)}{unit}" for name, bound in bounds.items() if bound is not None)
    return f"{said} {', '.join(given)}".strip()
