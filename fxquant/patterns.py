"""Patterns over layer names: one, and many with the exact ones hashed."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .errors import ConfigError


@dataclass(frozen=True)
class Pattern:
    r"""A pattern over layer names: ``re:...`` is anchored at the start only; anything else is a whole name or a glob.

    Raises:
        ConfigError: the text after ``re:`` is not a regular expression.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            self._regex  # noqa: B018 - compiled now so that a bad pattern is refused where it is written
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"'{self.text}' is not a valid regular expression: {error}") from None

    def __str__(self) -> str:
        return self.text

    @property
    def is_regex(self) -> bool:
        return self.text.startswith("re:")

    @property
    def is_exact(self) -> bool:
        """Whether it can only hit the name that it spells."""
        return not self.is_regex and not any(character in self.text for character in "*?[")

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.text.removeprefix("re:") if self.is_regex else fnmatch.translate(self.text))

    def matches(self, name: str) -> bool:
        """Whether it hits this name; case counts."""
        return (not self.is_regex and self.text == name) or self._regex.match(name) is not None


class PatternSet:
    """Patterns with their exact names hashed, since real ignore lists run to thousands of names."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        unique = dict.fromkeys(patterns)
        self.exact = {pattern.text: pattern for pattern in unique if pattern.is_exact}
        self.loose = [pattern for pattern in unique if not pattern.is_exact]

    def hits(self, name: str) -> list[Pattern]:
        exact = [self.exact[name]] if name in self.exact else []
        return exact + [pattern for pattern in self.loose if pattern.matches(name)]
