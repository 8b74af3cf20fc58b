"""The error for libraries that are missing because they are only installed on request, as extras of this package."""

import importlib.util
from collections.abc import Iterable


def missing(what: str, needs: str, extra: str) -> ValueError:
    """The error for a request that cannot be met without an extra.

    Args:
        what: the thing that was asked for.
        needs: the libraries that are missing.
        extra: the extra's name in pyproject.toml.
    """
    command = f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
    return ValueError(f"{what} needs {needs}; in swarm's folder: {command}")


def require(what: str, needs: str, extra: str, *, modules: Iterable[str]) -> None:
    """Raise the error that `missing` makes if one of these modules is not installed. Imports none of them."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise missing(what, needs, extra)
