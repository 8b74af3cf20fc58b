"""The tree that the module's docstring draws is the tree of the classes."""

import inspect
import re

import pytest

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


@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full", retry_after_seconds=0.5),
        errors.PeerUnavailable("gone", is_gone=True),
    ],
)
def test_errors_with_facts_keep_their_message(error: errors.SwarmError) -> None:
    assert str(error) in ("full", "gone")


def test_a_caller_does_one_of_three_things() -> None:
    assert errors.SwarmError.__subclasses__() == [errors.TryAnotherPeer, errors.TryLater, errors.Fatal]


def test_extra_facts_are_kept() -> None:
    assert errors.Overloaded("full", retry_after_seconds=0.5).retry_after_seconds == 0.5
    assert errors.PeerUnavailable("gone", is_gone=True).is_gone
