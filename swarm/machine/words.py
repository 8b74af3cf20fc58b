"""Words in messages for people, and text from strangers as a terminal may show it."""

_ENDINGS = (("y", "ies"), ("ch", "ches"))
"""The endings of nouns that do not simply take an s. (A y must follow a consonant.)"""


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 peer`, `2 peers`, `1,200 microbatches`, `0 entries`.

    Args:
        noun: the noun in the singular.
    """
    if number == 1:
        return f"1 {noun}"
    for ending, plural in _ENDINGS:
        if noun.endswith(ending):
            return f"{number:,} {noun.removesuffix(ending)}{plural}"
    return f"{number:,} {noun}s"


def printable(text: str, *, keep: str = "") -> str:
    """The text with a space for each unprintable character that is not in `keep`.

    Much of what programs show comes from strangers, and a terminal takes control characters for commands.
    """
    return "".join(char if char.isprintable() or char in keep else " " for char in text)
