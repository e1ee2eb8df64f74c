"""`python -m statebackend`: the command line, where the script is not on PATH."""

from __future__ import annotations

from statebackend.cli import main

main()
