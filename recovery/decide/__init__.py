"""Pure decisions of a recovery: which copy, which epoch, what is lost, whether to restart."""
