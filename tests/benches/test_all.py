"""Every bench can be run by the bench `all`: its command line is understood."""

from importlib import import_module

import pytest

from peers import cli
from scripts.benches.all import arguments_of
from scripts.benches.catalogue import MEASURING


@pytest.mark.parametrize("name", MEASURING)
def test_the_command_line_is_understood(name: str) -> None:
    _, *arguments = arguments_of(name, "text.txt")
    module = import_module(f"scripts.benches.{name.replace('-', '_')}")
    options = cli.parse(module.Options, prog=name, argv=arguments)
    assert options.json
    assert getattr(options, "dataset", "text.txt") == "text.txt"
