"""Work in threads that, unlike a pool's, do not keep the program from ending: a disk or a network may hang for ever."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begun(work: Callable[[], Result], name: str) -> Future[Result]:
    """Do `work` in a thread of its own. Whoever waits for the future may be cancelled, but not the work. The future
    raises what the work raises."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
