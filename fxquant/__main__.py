"""``python -m fxquant``: the command."""

from .cli import main

main()
