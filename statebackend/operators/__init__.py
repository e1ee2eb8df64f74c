"""The operators, whoever drives them: grouping by key, and the calls into the user's code."""
