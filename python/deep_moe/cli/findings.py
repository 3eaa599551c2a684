"""A line of ``deep-moe doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Finding:
    """One line; ``mark`` is ``ok``, ``warning`` or ``missing``, ``advice`` what to do or empty."""

    mark: str
    name: str
    text: str
    advice: str = ""

    def line(self) -> str:
        """Returns the line as plain text."""
        return f"{self.mark:<8} {self.name:<14} {self.text}" + (f" -> {self.advice}" if self.advice else "")
