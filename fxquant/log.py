"""The one logger: ``logging.getLogger("fxquant")``."""

import logging

log = logging.getLogger("fxquant")
