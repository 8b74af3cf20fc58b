"""Imports one part of a package without the package's own __init__, which imports all other parts.

Used by launcher.py: hivemind's __init__ takes twice as long to import as its DHT, and nothing here needs hivemind's
averaging, experts or optimizers.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Let the block import parts of a package without the package's own __init__.

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
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]
