"""Schemas of keys and state values, and the codecs that turn both into bytes.

`types` maps Spark's types to Arrow's; `ddl` reads them from text; `scalars` and `shapes` say which
Python values a field, a struct or a row takes; `keys` holds the canonical key encoding; `codec`
picks between the `fixed` and the `rows` value codec.
"""
