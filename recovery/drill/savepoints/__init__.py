"""Takes savepoints of a drill's job, checks them, and starts jobs from them."""
