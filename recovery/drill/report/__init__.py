"""What a drill found: checked, in figures, as text and as a page."""
