"""Shows our log lines where Serve shows its own.

Serve sets up the logger ``ray.serve`` alone: what others say below a warning is lost, and warnings go to
standard error without the replica that they come from.
"""

from __future__ import annotations

import logging

SERVE_LOGGER = "ray.serve"
OUR_LOGGERS = ("drafter", "gateway", "services", "verifier")


def hang_under_serve() -> None:
    """Make Serve's logger the parent of ours: its handlers and level hold for them. Call it in a replica.

    Mutates this process's loggers.
    """
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.parent = logging.getLogger(SERVE_LOGGER)
        # The parent's level; setting it also makes loggers forget which levels were off before.
        logger.setLevel(logging.NOTSET)
