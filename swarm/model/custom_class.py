"""Finds the class of `model.custom_class`, whose rules are in stage_module.py."""

import pkgutil

from torch import nn

from swarm.errors import in_one_line


def find(name: str) -> type[nn.Module]:
    """Import the class of this name. Raises ValueError if that fails, or if this is no class of torch modules."""
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        reason = in_one_line(error)
        raise ValueError(
            f"model.custom_class {name!r} cannot be imported ({reason}): name it as package.module:Class "
            "and install its package, or put it on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"model.custom_class {name!r} is not a class derived from torch.nn.Module")
    return found
