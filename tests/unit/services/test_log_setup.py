"""Our loggers speak through Serve's."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from services.log_setup import OUR_LOGGERS, SERVE_LOGGER, hang_under_serve

pytestmark = pytest.mark.unit


@pytest.fixture
def serve_log() -> Iterator[io.StringIO]:
    """What Serve's logger gets; all loggers are afterwards as they were."""
    text = io.StringIO()
    serve, handler = logging.getLogger(SERVE_LOGGER), logging.StreamHandler(text)
    parents = {name: logging.getLogger(name).parent for name in OUR_LOGGERS}
    level = serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    yield text
    serve.setLevel(level)
    serve.removeHandler(handler)
    for name, parent in parents.items():
        logging.getLogger(name).parent = parent


def test_information_reaches_the_replicas_log(serve_log: io.StringIO) -> None:
    logger = logging.getLogger("services.any")
    logger.info("lost")
    hang_under_serve()
    logger.info("kept")
    logging.getLogger("gateway.coordinator.coordinator").warning("kept too")
    logger.debug("below Serve's level")
    assert serve_log.getvalue() == "kept\nkept too\n"
