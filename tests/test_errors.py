"""The tree that the module's docstring draws is the tree of the classes."""

import inspect
import re

from swarm import errors


def _drawn_parents() -> dict[str, str]:
    """Class name -> parent, from the indentation of the drawing."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    branch: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        node = re.match(r"    [|` ]*(?:\|-- |`-- )?([A-Z]\w+)", line)
        if node is None:
            continue
        name, column = node[1], node.start(1)
        while branch and branch[-1][0] >= column:
            branch.pop()
        parents[name] = branch[-1][1] if branch else "Exception"
        branch.append((column, name))
    return parents


def test_the_drawing_is_the_code() -> None:
    classes = {
        name: error.__bases__[0].__name__
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if error.__module__ == errors.__name__
    }
    assert _drawn_parents() == classes


def test_a_caller_does_one_of_three_things() -> None:
    assert errors.SwarmError.__subclasses__() == [errors.TryAnotherPeer, errors.TryLater, errors.Fatal]
