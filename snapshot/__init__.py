"""How a consistent cut is taken and kept.

Reading order: `storage` (where bytes go) < `delta`, `record` (what the bytes are) < `log` (which
bytes count). Nothing is imported here: each module stands alone, and importing the package starts
and opens nothing.
"""
