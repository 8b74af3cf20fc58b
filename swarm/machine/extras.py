"""What is imported only on request: libraries that are extras of this package, and classes of the user's own."""

import importlib.util
import pkgutil
from collections.abc import Iterable

from swarm.errors import in_one_line


def missing(what: str, needs: str, extra: str) -> ValueError:
    """The error for a request that cannot be met without libraries that are an extra in pyproject.toml."""
    command = f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
    return ValueError(f"{what} needs {needs}; in swarm's folder: {command}")


def require(what: str, needs: str, extra: str, *, modules: Iterable[str]) -> None:
    """Raise the error that `missing` makes if one of these modules is not installed. Imports none of them."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise missing(what, needs, extra)


def own_class(field: str, name: str) -> object:
    """Import what `package.module:Class` names. It runs that code, so the caller has to know that our user wants this.
    `field` is the field of the configuration that names it, for the error. Raises ValueError, of one line, if it cannot
    be imported."""
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        raise ValueError(
            f"{field} {name!r} cannot be imported ({in_one_line(error)}): name it as package.module:Class "
            "and install its package, or put it on PYTHONPATH"
        ) from error
