"""Prepares the environment before anything imports grpc, hivemind or torch, as the programs do, and the state for each
test."""

import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterator
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

from peers.shared.process import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes is the machine's affair. Each run draws others.
settings.register_profile(
    "any machine", parent=settings.default, deadline=None, max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    # torch says the first once where a backward's first operation on a GPU is a product, and then does what it says. It
    # says the second of what it compiles in float32, as tests compare it.
    for said in ("Attempting to run cuBLAS, but there was no current CUDA context", "TensorFloat32 tensor cores"):
        config.addinivalue_line("filterwarnings", f"ignore:{said}:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Exclude modules and tests from garbage collection. They stay until the end, and examining them again and again
    would take seconds."""
    gc.disable()
    try:
        _import_own_part(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_own_part(config: pytest.Config) -> None:
    """Of several processes that run tests, let each import another part of the files first. In a fresh clone no file is
    compiled yet, and otherwise all processes would compile each file at the same moment."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    places = [config.rootpath / argument.partition("::")[0] for argument in config.args]
    files = sorted({file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])})
    for file in files[number::count]:
        # Whatever is wrong with a file is told when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A program that a test runs in this process sets up logging. The next test must not depend on that."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logger.level for name, logger in _loggers().items()}
    hooks = threading.excepthook, sys.unraisablehook
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
    for name, logger in _loggers().items():
        if logger.level != (former := levels.get(name, logging.NOTSET)):
            logger.setLevel(former)
    threading.excepthook, sys.unraisablehook = hooks


def _loggers() -> dict[str, logging.Logger]:
    return {name: it for name, it in logging.Logger.manager.loggerDict.items() if isinstance(it, logging.Logger)}
