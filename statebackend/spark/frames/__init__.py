"""Makes frames with state out of streaming frames: anchors, inputs, plans and their checks."""
