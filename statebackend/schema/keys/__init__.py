"""Keys: their one encoding, by value and by column, and their schemas, which never change."""
