"""Makes what --help says above its boxes as wide as the terminal.

Used by cli.py, and by subcommands.py for programs of several commands. The boxes themselves are tyro's.
"""

import io
import re
import shutil
import textwrap
from typing import TextIO

MOST_COLUMNS = 120
"""The width in wider terminals."""
_BOX = re.compile(r"^(?:\x1b\[[0-9;]*m)*[ +\u256d]", re.MULTILINE)
"""Finds the first line of a box, or of what stands for one where only ASCII can be printed."""


class Told(io.StringIO):
    """Takes what is printed for another stream, and looks like that one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a StringIO it is None
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()


def fitted_above_the_boxes(text: str) -> str:
    """What --help says, of which tyro makes only the boxes as wide as the terminal."""
    found = _BOX.search(text)
    return text if found is None else f"{fitted(text[: found.start()])}\n{text[found.start() :]}"


def fitted(text: str) -> str:
    """The text with no line wider than the terminal. Paragraphs are filled; indented lines stay lines of their own."""
    width, lines = min(shutil.get_terminal_size().columns, MOST_COLUMNS), list[str]()
    for line in text.splitlines():
        if line[:1].strip() and lines and lines[-1][:1].strip():
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(_filled(line, width) for line in lines)


def _filled(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line, width, subsequent_indent=f"{indent}    " if indent else "", break_long_words=False, break_on_hyphens=False
    )
