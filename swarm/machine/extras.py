"""Libraries that are installed on request alone, as extras of this package: what to do where one is missing."""


def missing(what: str, needs: str, extra: str) -> ValueError:
    """The error of what cannot be done without an extra.

    Args:
        what: was asked for.
        needs: the libraries that are not here.
        extra: its name in pyproject.toml.
    """
    command = f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
    return ValueError(f"{what} needs {needs}; in swarm's folder: {command}")
