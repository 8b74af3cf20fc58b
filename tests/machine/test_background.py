"""Work in the background ends with its future, and keeps no program from ending."""

import threading

import pytest

from swarm.machine.background import begun


def test_work_has_a_daemon_thread_of_its_own_and_cannot_be_cancelled() -> None:
    goes_on = threading.Event()

    def work() -> threading.Thread:
        goes_on.wait(30)
        return threading.current_thread()

    future = begun(work, "work")
    assert not future.cancel()
    goes_on.set()
    assert (future.result(30).name, future.result().daemon) == ("work", True)


def test_the_future_raises_what_the_work_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        begun(lambda: 1 // 0, "work").result(30)
