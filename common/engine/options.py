"""Options of an engine or a backend: texts from the command line, read by whoever understands them.

Theory of operation: the service knows no option. A factory asks for each that it has, by name, with its type,
its bounds and its default; then `close` refuses what nobody asked for, and names what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ConfigError


class Options:
    """What was given for one engine; asked once by its factory."""

    def __init__(self, field: str, given: Sequence[str]) -> None:
        """Take KEY=VALUE texts; `field` is the setting that an error blames.

        Raises: `ConfigError` for a text without a key, and for a key that is given twice.
        """
        self._field = field
        self._values: dict[str, str] = {}
        self._known: list[str] = []
        for text in given:
            key, separator, value = text.partition("=")
            if not key or not separator:
                raise ConfigError(field, text, "is not KEY=VALUE")
            if key in self._values:
                raise ConfigError(field, text, f"{key} is given twice, first as {self._values[key]!r}")
            self._values[key] = value

    def text(self, name: str, default: str = "") -> str:
        """Return an option as it was given."""
        self._known.append(name)
        return self._values.get(name, default)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Return one of the words that are allowed.

        Raises: `ConfigError` for another one.
        """
        value = self.text(name, default)
        if value not in allowed:
            raise self._refusal(name, f"must be one of {', '.join(allowed)}")
        return value

    def integer(self, name: str, default: int, *, minimum: int = 0, maximum: int = 1 << 40) -> int:
        """Return a whole number within bounds.

        Raises: `ConfigError` when it is none, or out of them.
        """
        return self._integer(name, self.text(name, str(default)), minimum, maximum)

    def integers(self, name: str, default: Sequence[int], *, minimum: int = 1) -> tuple[int, ...]:
        """Return whole numbers that ascend, given as 128,512.

        Raises: `ConfigError` when one is none, is below the minimum, or does not ascend.
        """
        text = self.text(name, ",".join(map(str, default)))
        numbers = [self._integer(name, part, minimum, 1 << 40) for part in text.split(",") if text]
        if numbers != sorted(set(numbers)):
            raise self._refusal(name, "must ascend without repeats")
        return tuple(numbers)

    def number(self, name: str, default: float, *, minimum: float = 0.0, maximum: float = 1e15) -> float:
        """Return a number within bounds.

        Raises: `ConfigError` when it is none, or out of them.
        """
        text = self.text(name, f"{default:g}")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # Not `value < minimum or ...`: every comparison with NaN is false.
        if not minimum <= value <= maximum:
            raise self._refusal(name, f"must be a number within [{minimum:g}, {maximum:g}]")
        return value

    def close(self) -> None:
        """Refuse what nobody asked for.

        Raises: `ConfigError` that names the options there are.
        """
        for key, value in self._values.items():
            if key not in self._known:
                known = ", ".join(self._known) or "none"
                raise ConfigError(self._field, f"{key}={value}", f"no such option; there are: {known}")

    def refuse(self, name: str, problem: str) -> ConfigError:
        """Return the refusal of an option that a factory has asked for."""
        return self._refusal(name, problem)

    def _integer(self, name: str, text: str, minimum: int, maximum: int) -> int:
        # int() takes more than digits: spaces, underscores, other alphabets.
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(maximum))
        if not is_number or not minimum <= int(text) <= maximum:
            raise self._refusal(name, f"must be a whole number within [{minimum}, {maximum}]")
        return int(text)

    def _refusal(self, name: str, problem: str) -> ConfigError:
        return ConfigError(self._field, f"{name}={self._values.get(name, '')}", problem)
