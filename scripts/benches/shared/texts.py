"""Texts of four kinds that every machine has on which swarm is installed, without a network.

Their kinds are `python`, sources of the standard library; `c`, headers of Python, numpy and torch; `html`, pages that
pydoc makes of modules of the standard library; and `english`, pydoc's topics and what packages say of themselves.
"""

import importlib
import pydoc
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

from swarm.data import text_files

LONGEST = 32_000
"""The most characters of a text; the rest of a longer file is left out, so that no file is much of its kind."""
_HELD_OUT = 1 / 8
_PAGES_OF = (
    "argparse", "array", "asyncio.base_events", "asyncio.streams", "base64", "bisect", "bz2", "calendar", "cmd", "code",
    "codecs", "collections", "concurrent.futures.thread", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "dis", "email.charset", "email.message", "email.mime.text", "email.parser",
    "email.policy", "enum", "fileinput", "fractions", "ftplib", "functools", "gettext", "glob", "graphlib", "gzip",
    "hashlib", "heapq", "hmac", "html.parser", "http.client", "http.cookiejar", "http.cookies", "http.server",
    "imaplib", "importlib.abc", "inspect", "io", "ipaddress", "itertools", "json", "json.decoder", "logging",
    "logging.handlers", "lzma", "mailbox", "math", "mimetypes", "multiprocessing.pool", "netrc", "numbers", "operator",
    "pathlib", "pickle", "pickletools", "plistlib", "poplib", "pprint", "queue", "random", "re", "sched", "secrets",
    "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "statistics",
    "string", "struct", "subprocess", "symtable", "tarfile", "tempfile", "textwrap", "threading", "timeit", "token",
    "tokenize", "trace", "traceback", "types", "typing", "unittest.case", "unittest.mock", "urllib.parse",
    "urllib.request", "urllib.robotparser", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom",
    "xml.etree.ElementTree", "xml.sax.handler", "xmlrpc.client", "zipapp", "zipfile", "zoneinfo",
)  # fmt: skip


def of_each_kind(num_characters: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The texts to train on, and those that are held out, of each kind. All kinds have as many characters.

    Args:
        num_characters: how many characters of each kind are wanted. If one has fewer, all get as many as it has.

    Raises:
        ValueError: there is hardly any text of a kind.
    """
    found = {kind: _shuffled(texts(), num_characters) for kind, texts in _KINDS.items()}
    sizes = {kind: sum(map(len, texts)) for kind, texts in found.items()}
    least = min(sizes.values())
    if least < LONGEST / _HELD_OUT:
        raise ValueError(f"too little text of some kind is installed here; characters of each: {sizes}")
    cut = {kind: list(_first(texts, least)) for kind, texts in found.items()}
    held_out = {kind: list(_first(texts, int(least * _HELD_OUT))) for kind, texts in cut.items()}
    # A text that is held out in part is not trained on either.
    return {kind: texts[len(held_out[kind]) :] for kind, texts in cut.items()}, held_out


def _shuffled(texts: Iterable[str], num_characters: int) -> list[str]:
    """Some of the texts, in an order that is always the same, none twice."""
    different = dict.fromkeys(text[:LONGEST] for text in texts if text.strip())
    in_order = sorted(different)
    random.Random(0).shuffle(in_order)
    return list(_first(in_order, num_characters))


def _first(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        if num_characters <= 0:
            return
        yield text[:num_characters]
        num_characters -= len(text)


def _files(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if not text_files.fault(path):
            yield path.read_text(encoding="utf-8")


def _python() -> Iterator[str]:
    # What is in pydoc_data is English, and encodings are mostly tables.
    files = text_files.find("stdlib").files
    return _files(path for path in files if not {"pydoc_data", "encodings"} & {*path.parts})


def _c() -> Iterator[str]:
    # Of torch's headers only these: most of the others are generated, and alike.
    torch_headers = Path(torch.__file__).parent / "include" / "c10"
    for folder in (Path(sysconfig.get_path("include")), Path(np.get_include()), torch_headers):
        yield from _files(sorted(folder.rglob("*.h")))


def _html() -> Iterator[str]:
    maker = pydoc.HTMLDoc()
    for name in _PAGES_OF:
        try:
            module = importlib.import_module(name)
        except ImportError:  # A Python may be built without it.
            continue
        yield maker.page(name, maker.document(module))


def _english() -> Iterator[str]:
    yield from topics.topics.values()
    for package in metadata.distributions():
        # Behind the headers, with an empty line between.
        yield (package.read_text("METADATA") or "").partition("\n\n")[2]


_KINDS: Mapping[str, Callable[[], Iterable[str]]] = {"python": _python, "c": _c, "html": _html, "english": _english}
