"""A proxy between S3 clients and a server, which counts requests and breaks them."""
