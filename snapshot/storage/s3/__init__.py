"""A store in S3 or a server that speaks its protocol: client, errors, retries, uploads."""
