"""The committed generated code is current, and the contract keeps to one style."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

ROOT = Path(__file__).parents[1]
GENERATED = Path("swarm/rpc/v1")


def test_generated_code_is_current(tmp_path: Path) -> None:
    environment = {"PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([ROOT / "scripts" / "generate_protos", tmp_path], env=environment, check=True)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / GENERATED).glob("*_pb2*")}
    committed = {path.name: path.read_bytes() for path in (ROOT / GENERATED).glob("*_pb2*.py*")}
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run scripts/generate_protos: {stale}"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "proto" / GENERATED).glob("*.proto")))
def test_names_keep_to_one_style(name: str) -> None:
    """snake_case fields, PascalCase messages, UPPER_CASE values that begin with their enum's name."""
    file: FileDescriptor = importlib.import_module(f"swarm.rpc.v1.{name}_pb2").DESCRIPTOR
    assert file.package == "swarm.rpc.v1"
    messages = list(file.message_types_by_name.values())
    enums = list(file.enum_types_by_name.values())
    for message in messages:
        assert re.fullmatch(r"([A-Z][a-z0-9]+)+", message.name)
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name) for field in message.fields)
        messages += message.nested_types
        enums += message.enum_types
    for enum in enums:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(prefix) for value in enum.values)
