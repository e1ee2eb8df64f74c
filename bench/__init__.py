"""Benchmarks: `python -m bench --help`. Figures count only with the machine's description."""
