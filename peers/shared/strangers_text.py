"""Text from strangers, as a terminal may show it: the names, messages and tokens of other peers."""


def printable(text: str, *, keep: str = "") -> str:
    """The text with a space for each unprintable character that is not in `keep`.

    Much of what programs show comes from strangers, and a terminal takes control characters for commands.
    """
    return "".join(char if char.isprintable() or char in keep else " " for char in text)
