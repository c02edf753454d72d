"""`python -m layout_tuner.cli`, as torchrun starts it."""

from . import main

main()
