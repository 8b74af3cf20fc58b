"""Importing a part of a package without the package's own __init__, which imports all the others.

Used by node.py: hivemind's takes twice as long as its DHT, and nothing here needs its averaging, experts or optimizers.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Have parts of a package imported inside the block without its own __init__.

    A later import of the package itself gives all of it. Where it is there already, nothing changes.

    Raises:
        ModuleNotFoundError: it is not installed.
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
