"""Prepares the environment before anything imports grpc, hivemind or torch, as the programs do, and the state for each
test."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterator

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude modules and tests from garbage collection. They stay until the end, and examining them again and again
    would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
