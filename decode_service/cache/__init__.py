"""The paged KV cache: start at `cache.py`, which says what each file here answers."""
