"""Downloads models' files from Hugging Face's hub, and gives a one-line reason if that fails. Executes nothing from
them.

The library huggingface_hub is installed with tokenizers. It keeps downloads in a cache of its own, and finds them there
without a network.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import PeerUnavailable, in_one_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether a text may be a model's name on the hub (`gpt2`, `OWNER/NAME`), and not a path or a file's name."""
    return _NAME.fullmatch(text) is not None and not text.endswith((".json", ".toml", ".model"))


def download(name: str, files: Sequence[str], *, revision: str | None = None) -> Path:
    """Download those of some files that a model has, unless they are here already, and return their folder. Blocks.
    `revision` is the commit; None for the newest. It is the name of the folder that is returned. Raises
    PeerUnavailable, of one line, if the files cannot be downloaded."""
    # It is imported only here, because that takes a while, and most runs do not need it.
    import huggingface_hub

    with _told(name):
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), revision=revision))


def sizes(name: str, files: Sequence[str], *, revision: str) -> dict[str, int]:
    """Ask for the bytes of those of some files that a model has on the hub. Blocks. Raises PeerUnavailable."""
    import huggingface_hub

    with _told(name):
        found = huggingface_hub.HfApi().get_paths_info(name, list(files), revision=revision)
        return {file.path: getattr(file, "size", 0) for file in found}


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Raise PeerUnavailable, with one line, for any error of the block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(
            f"{name} is no folder here, and cannot be downloaded from the hub: {reason(error, name)}"
        ) from None


def reason(error: Exception, page: str) -> str:
    """A few words that say what is wrong and what to do about it. (The library's own messages are long.) `page` is the
    path of the hub's page: the model's name, or `datasets/NAME`."""
    from huggingface_hub import errors

    # If the cache has nothing either, the library's error has the hub's error only as its cause.
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to ask the hub, and the files are not in its cache: unset it"
    if isinstance(cause, errors.GatedRepoError):
        return f"one has to ask for it: do that at https://huggingface.co/{page}, and set HF_TOKEN"
    if isinstance(cause, errors.RepositoryNotFoundError) or type(cause).__name__ == "DatasetNotFoundError":
        return "the hub has nothing of that name, or does not show it to you: check the name, or set HF_TOKEN"
    if status in (401, 403):
        return "the hub does not let you: set HF_TOKEN to a token with that right"
    if status == 429:
        return "the hub has had too many requests from here: wait a few minutes, or set HF_TOKEN"
    if status is not None:
        return f"the hub answers with code {status}: try again later"
    if cause is None or _is_of_the_network(cause):
        return "the hub cannot be reached from here: check the network, or name a folder"
    return in_one_line(error)[:300]


def _is_of_the_network(error: BaseException) -> bool:
    """Whether no answer came, or a part of one. The library has used several HTTP clients."""
    of_client = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3")
    return of_client or isinstance(error, ConnectionError | TimeoutError)
