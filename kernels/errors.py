"""Errors that kernels, passes and the user-facing layer share."""


class FxQuantError(Exception):
    """Base of every error that fxquant raises on purpose."""


class UnsupportedError(FxQuantError, ValueError):
    """A layer, format, shape or device that cannot be served; the message gives the reason and a way out."""
