"""Imports one part of a package without the package's own __init__, which imports all other parts.

Used by launcher.py: hivemind's __init__ takes twice as long to import as its DHT, and nothing here needs hivemind's
averaging, experts or optimizers. The DHT needs no torch either, which its packages' __init__ import.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def bare_package(name: str, *parts: str) -> Iterator[None]:
    """Let the block import parts of a package without the package's own __init__.

    Args:
        parts: modules of the package whose names the block imports from the package itself.

    A later import of the package itself imports all of it. If the package was imported before, the block changes
    nothing.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    if name in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        for part in parts:
            vars(package).update(vars(importlib.import_module(f"{name}.{part}")) | _own(package))
        yield
    finally:
        del sys.modules[name]


def _own(module: ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name.startswith("__")}
