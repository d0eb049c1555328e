"""Decoding: the seam with transformers, the loop, verification and statistics."""
