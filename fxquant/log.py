"""The one logger: ``logging.getLogger("fxquant")``."""

import functools
import logging

log = logging.getLogger("fxquant")


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Log a warning the first time that this text comes up."""
    log.warning("%s", message)
