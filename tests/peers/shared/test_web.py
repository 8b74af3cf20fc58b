"""What a program that answers over HTTP is told on its command line, and where it listens."""

from pathlib import Path

import pytest

from peers.shared.web import Listener, find_secret

VARIABLE = "SWARM_SOME_TOKEN"


def _find(option_value: str | None, environment: dict[str, str]) -> str | None:
    return find_secret(option_value, environment, option="--some-token", variable=VARIABLE)


def test_a_secret_is_of_the_option_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-file\n")
    environment = {VARIABLE: "of-environment"}
    assert _find(None, {}) is None
    assert _find(None, environment) == "of-environment"
    assert _find("of-option", environment) == "of-option"
    assert _find(f"@{tmp_path / 'token'}", environment) == "of-file"


@pytest.mark.parametrize("secret", ["", "a b", "é", "a\n"])
def test_a_secret_that_no_client_can_send_is_refused(secret: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--some-token must be"):
        _find(secret, {})
    with pytest.raises(ValueError, match=f"{VARIABLE} must be"):
        _find(None, {VARIABLE: secret})
    with pytest.raises(FileNotFoundError):
        _find(f"@{tmp_path / 'nothing'}", {})


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_an_address_is_taken_at_once(host: str, is_local: bool) -> None:
    listener = Listener(host, 0, option="--port")
    port = int(listener.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=rf"^--port .*:{port}: Address already in use; choose another"):
        Listener(host, port, option="--port")
    assert listener.is_local == is_local
    listener.close()
