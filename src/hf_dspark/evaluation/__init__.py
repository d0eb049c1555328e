"""Measuring draft models against plain `generate`: accepted length, speed, and whether the text is the same."""
