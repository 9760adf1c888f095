"""A catalog file as a tree: every key known, every constant there, in its unit and with its source."""

from collections.abc import Iterator, Mapping
from typing import Any

from plait.errors import describe_nearest
from plait.planner.hardware.constant import Constant, Provenance, parse_quantity

Tree = Mapping[str, Any]

_ATTRIBUTES = ("value", "pieces", "source", "provenance", "confidence", "error", "low", "high", "note")
_SOURCE_KEYS = ("text", "date", "provenance", "confidence")
_CONFIDENCES = ("high", "medium", "low", "illustrative")


_MOST_DEVICES = 2.0**17
"""Of a host or domain: for each number of them there is a line of latency and bandwidth."""


class Reader:
    """Takes constants out of a tree and collects what is wrong with it.

    A table may name the `source` (and `error`) of all the constants beneath it; a constant may name its own.
    """

    def __init__(self, tree: Tree) -> None:
        self.problems: list[str] = []
        self.constants: dict[str, Constant] = {}
        self._tree = tree
        self._taken: set[str] = set()
        self._sources = self._read_sources(tree.get("sources"))

    def take_text(self, key: str) -> str:
        """A required string."""
        value = self._find(key)
        self._taken.add(key)
        if not isinstance(value, str):
            self.problems.append(f"{key}: is missing" if value is None else f"{key}: should be a string")
            return ""
        return value

    def take_texts(self, key: str) -> tuple[str, ...]:
        """An optional list of strings."""
        value = self._find(key)
        self._taken.add(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.problems.append(f"{key}: should be a list of strings")
            return ()
        return tuple(value)

    def take_choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self._find(key)
        self._taken.add(key)
        if value is None:
            return default
        if value not in choices:
            self.problems.append(f"{key}: should be one of {', '.join(choices)}, not {value!r}")
            return default
        return str(value)

    def take(self, key: str, unit: str, *, positive: bool = True, most: float | None = None) -> Constant:
        """A required constant; one that is missing or wrong is noted, and stands in as 1."""
        value = self._find(key)
        self._taken.add(key)
        if value is None:
            self.problems.append(f"{key}: is missing")
            return _stand_in(key, unit)
        entry = value if isinstance(value, Mapping) else {"value": value}
        quantity = parse_quantity(entry.get("value"), unit)
        if isinstance(quantity, str):
            self.problems.append(f"{key}: {quantity}")
            return _stand_in(key, unit)
        if quantity < 0 or (positive and quantity == 0):
            self.problems.append(f"{key}: should be {'more than' if positive else 'at least'} 0, not {quantity:g}")
        if most is not None and quantity > most:
            self.problems.append(f"{key}: should be at most {most:g}, not {quantity:g}")
        return self.record(key, entry, quantity, unit)

    def take_share(self, key: str) -> Constant:
        """A required ratio above 0 that is never above 1, since nothing is faster than its peak."""
        return self.take(key, "1", most=1.0)

    def take_count(self, key: str) -> Constant:
        """A required number of devices; a wrong one stands in as 1."""
        known = len(self.problems)
        constant = self.take(key, "devices", most=_MOST_DEVICES)
        if len(self.problems) == known and constant.value != int(constant.value):
            self.problems.append(f"{key}: should be a whole number of devices, not {constant.value:g}")
        return constant if len(self.problems) == known else _stand_in(key, "devices")

    def take_pieces(self, key: str) -> tuple[Constant, tuple[tuple[float, float], ...]]:
        """Latency-bandwidth lines; they are listed as one constant, the bandwidth of the last."""
        entry = self._find(key)
        self._taken.add(key)
        pieces = entry.get("pieces") if isinstance(entry, Mapping) else entry
        if not isinstance(pieces, list) or not pieces:
            self.problems.append(f'{key}: should be pieces such as [["11 us", "300 GB/s"]]')
            return _stand_in(key, "B/s"), ((0.0, 1.0),)
        read = tuple(self._read_piece(key, piece) for piece in pieces)
        shown = " or ".join(f"{latency_s * 1e6:.4g} us at {rate / 1e9:.4g} GB/s" for latency_s, rate in read)
        attributes = {**entry, "note": entry.get("note", shown)} if isinstance(entry, Mapping) else {"note": shown}
        return self.record(key, attributes, read[-1][1], "B/s"), read

    def list_keys(self, key: str) -> list[str]:
        """The keys of a table that are not attributes of all its constants."""
        table = self._find(key)
        return [name for name in table if name not in ("source", "error")] if isinstance(table, Mapping) else []

    def list_names(self, key: str, known: tuple[str, ...]) -> list[str]:
        """The keys of a required table that may have any of the `known` ones, and at least one of them."""
        names = self.list_keys(key)
        if not names:
            self.problems.append(f"{key}: is missing")
        for name in names:
            if name not in known:
                self._taken.add(f"{key}.{name}")
                self.problems.append(f"{key}.{name}: is not known; {describe_nearest(name, known)}")
        return [name for name in names if name in known]

    def record(self, key: str, entry: Tree, value: float, unit: str) -> Constant:
        """Make a constant of an entry, with the source it or its table names."""
        for name in entry:
            if name not in _ATTRIBUTES:
                self.problems.append(f"{key}.{name}: is not known; {describe_nearest(name, _ATTRIBUTES)}")
        named = entry.get("source", self._inherit(key, "source"))
        source = self._sources.get(named) if isinstance(named, str) else None
        if source is None:
            wrong = "has no source" if named is None else f'the source "{named}" is not under [sources]'
            self.problems.append(f"{key}: {wrong}")
            return _stand_in(key, unit)
        constant = Constant(
            key, value, unit,
            Provenance(self._choose(key, entry, "provenance", source["provenance"], tuple(Provenance))),
            source["text"], source["date"],
            self._choose(key, entry, "confidence", source["confidence"], _CONFIDENCES),
            self._share(key, "error", entry.get("error", self._inherit(key, "error"))),
            self._bound(key, entry, "low", unit), self._bound(key, entry, "high", unit), str(entry.get("note", "")),
        )  # fmt: skip
        self.constants[key] = constant
        return constant

    def check_all_taken(self) -> None:
        """Note every key that nothing has asked for."""
        known = sorted(self._taken)
        for key in _list_leaves(self._tree):
            if key.startswith("sources.") or key == "based_on":
                continue
            parts = key.split(".")
            covered = any(".".join(parts[:length]) in self._taken for length in range(1, len(parts) + 1))
            if not covered and parts[-1] not in ("source", "error"):
                alike = known if len(parts) > 1 else sorted({name.partition(".")[0] for name in known})
                self.problems.append(f"{key}: is not known; {describe_nearest(key, alike)}")

    def _find(self, key: str) -> Any:
        value: Any = self._tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _inherit(self, key: str, attribute: str) -> Any:
        parts = key.split(".")
        for length in range(len(parts) - 1, 0, -1):
            found = self._find(".".join([*parts[:length], attribute]))
            if found is not None:
                return found
        return self._tree.get(attribute)

    def _read_piece(self, key: str, piece: Any) -> tuple[float, float]:
        if not isinstance(piece, list) or len(piece) != 2:
            self.problems.append(f'{key}: a piece should be a latency and a bandwidth, ["11 us", "300 GB/s"]')
            return 0.0, 1.0
        latency_s, rate = parse_quantity(piece[0], "s"), parse_quantity(piece[1], "B/s")
        for wrong in (latency_s, rate):
            if isinstance(wrong, str):
                self.problems.append(f"{key}: {wrong}")
        if isinstance(latency_s, str) or isinstance(rate, str):
            return 0.0, 1.0
        if latency_s < 0 or rate <= 0:
            self.problems.append(f"{key}: a latency is at least 0, a bandwidth more than 0")
        return latency_s, rate

    def _read_sources(self, sources: Any) -> dict[str, dict[str, str]]:
        if not isinstance(sources, Mapping):
            self.problems.append("sources: is missing")
            return {}
        return {name: self._read_source(f"sources.{name}", source) for name, source in sources.items()}

    def _read_source(self, key: str, source: Any) -> dict[str, str]:
        table = source if isinstance(source, Mapping) else {}
        for name in table:
            if name not in _SOURCE_KEYS:
                self.problems.append(f"{key}.{name}: is not known; {describe_nearest(name, _SOURCE_KEYS)}")
        for name in _SOURCE_KEYS:
            if name not in table:
                self.problems.append(f"{key}.{name}: is missing")
        return {
            "text": str(table.get("text", "")),
            "date": str(table.get("date", "")),
            "provenance": self._choose(key, table, "provenance", Provenance.ASSUMED, tuple(Provenance)),
            "confidence": self._choose(key, table, "confidence", "low", _CONFIDENCES),
        }

    def _choose(self, key: str, entry: Tree, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = entry.get(name, default)
        if value not in choices:
            self.problems.append(f"{key}.{name}: should be one of {', '.join(choices)}, not {value!r}")
            return default
        return str(value)

    def _share(self, key: str, name: str, value: Any) -> float | None:
        if value is None:
            return None
        quantity = parse_quantity(value, "1")
        if isinstance(quantity, str) or quantity < 0:
            self.problems.append(f"{key}.{name}: should be a share such as 0.05, not {value!r}")
            return None
        return quantity

    def _bound(self, key: str, entry: Tree, name: str, unit: str) -> float | None:
        if name not in entry:
            return None
        quantity = parse_quantity(entry[name], unit)
        if isinstance(quantity, str):
            self.problems.append(f"{key}.{name}: {quantity}")
            return None
        return quantity


def _stand_in(key: str, unit: str) -> Constant:
    return Constant(key, 1.0, unit, Provenance.ASSUMED, "", "", "low")


def _list_leaves(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and "value" not in value and "pieces" not in value:
            yield from _list_leaves(value, f"{key}.")
        else:
            yield key
