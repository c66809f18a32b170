"""What all tests of the scheduler share."""

import logging
import os
from collections.abc import Iterator

import pytest

from adaptive_engine import Build, builder
from akjax.scheduler.settings import PREFIX
from harness import make_config


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    return builder(monkeypatch)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What our logger says, whether or not vLLM lets its loggers' records through to the root."""
    make_config()  # the first one sets vLLM's logging up anew, without the handlers of others
    logger = logging.getLogger("vllm.akjax")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
