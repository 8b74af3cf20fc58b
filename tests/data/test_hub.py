"""Errors of the hub are reported in a few words, instead of the library's own message."""

from typing import Any

import pytest
from huggingface_hub import errors

from swarm.data import hub


class _Answer:
    """A response of the hub, as much of it as an error keeps."""

    request = None

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers = dict[str, str]()


def _refusal(kind: Any, status_code: int) -> Exception:
    """An error of the library's, with a page of text."""
    error: Exception = kind("Client Error.\n" + "A long explanation. " * 40, response=_Answer(status_code))
    return error


def _nothing_cached(cause: Exception | None) -> Exception:
    error = errors.LocalEntryNotFoundError("Got: " + "A long explanation. " * 40)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_refusal(errors.RepositoryNotFoundError, 401), "check the name, or set HF_TOKEN"),
        (_refusal(errors.GatedRepoError, 403), "do that at https://huggingface.co/me/mine, and set HF_TOKEN"),
        (_nothing_cached(errors.OfflineModeIsEnabled()), "HF_HUB_OFFLINE forbids"),
        (_nothing_cached(ConnectionError("[Errno -3] " * 30)), "check the network, or name a folder"),
        (_nothing_cached(_refusal(errors.HfHubHTTPError, 429)), "wait a few minutes"),
        (RuntimeError("something\nelse"), "something else"),
    ],
)
def test_a_failed_download_is_told_in_a_few_words(error: Exception, said: str) -> None:
    reason = hub.reason(error, "me/mine")
    assert said in reason
    assert "long explanation" not in reason
    assert len(reason) < 120
    assert "\n" not in reason
