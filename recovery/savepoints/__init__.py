"""Makes savepoints, checks them, copies them, and starts jobs from them."""
