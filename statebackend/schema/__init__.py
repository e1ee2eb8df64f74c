"""Schemas of keys and state values, and the codecs that turn both into bytes.

`types` maps Spark's types to Arrow's; `scalars` says which Python values a field takes; `keys`
holds the canonical key encoding; `codec` picks between the `fixed` and the `rows` value codec.
"""
