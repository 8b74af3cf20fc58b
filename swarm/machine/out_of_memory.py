"""Recognises exceptions which say that memory ran out, and what it was needed for.

The programs turn such an exception into one line, and a stage then takes fewer microbatches. Python, torch and the
system each have their own exception for it, and in most cases only its message shows the cause. This file does not
import torch, because memory may run out during that import.
"""

import errno
import re

_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "alloc_failed",
    # A thread needs memory for its stack, and a library needs memory for its code.
    "can't start new thread",
    "failed to map segment",
)
"""Parts of such messages, in lower case."""
SMALLER = "a smaller data.microbatch_size or data.sequence_length, model.gradient_checkpointing = true"
"""The settings of a run with which training takes less memory, for the lines that report a lack of it."""
_SIZE = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTP]i?B)?", re.IGNORECASE)
_LIBRARY = re.compile(r"([^/\s]+): failed to map segment")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def is_out_of_memory(error: BaseException) -> bool:
    # OutOfMemoryError is torch's.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError | ImportError):
        text = str(error).lower()
        return any(words in text for words in _WORDS)
    return False


def what_was_asked(error: BaseException) -> str:
    """The size or library for which there was no memory, such as `4.0 GiB`; `what was needed` if the exception does not
    say it."""
    text = str(error)
    if "new thread" in text:
        return "another thread"
    if library := _LIBRARY.search(text):
        return f"the library {library[1]}"
    if (found := _SIZE.search(text)) is None:
        return "what was needed"
    size, unit = found[1], found[2] or "bytes"
    return in_words(int(float(size))) if unit.lower() == "bytes" else f"{size} {unit}"


def in_words(num_bytes: int) -> str:
    """A number of bytes in words, such as `4.0 GiB`."""
    size = float(num_bytes)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
