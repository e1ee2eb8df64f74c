"""An epoch's input: grouped by key, packed for the shuffle, staged on disk, told late or not."""
