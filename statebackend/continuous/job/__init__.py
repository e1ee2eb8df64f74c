"""A continuous job as it is built: streams, operators, sinks, options, and its messages."""
