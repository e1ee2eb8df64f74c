"""`python -m statebackend.cli`."""

from __future__ import annotations

from statebackend.cli import main

main()
