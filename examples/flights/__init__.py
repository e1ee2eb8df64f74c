"""A year of flights as a stream: killed twice, and compared with a batch computation at the end.

`python -m examples.flights` runs it. To read it: `processor.py` (what is kept per aircraft),
`driver.py` (the Spark program), `batch.py` (the same answers without any state), and `demo.py` (who
starts, kills and compares).
"""
