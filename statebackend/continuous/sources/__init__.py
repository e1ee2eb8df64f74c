"""Where a continuous job's rows come from: splits that can be read again from any position."""
