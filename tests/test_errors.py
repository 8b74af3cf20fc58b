"""What a caller does about an error follows from the branch of the tree that it is on."""

from swarm import errors


def test_a_caller_does_one_of_three_things() -> None:
    assert errors.SwarmError.__subclasses__() == [errors.TryAnotherPeer, errors.TryLater, errors.Fatal]
