"""The only door to transformers: load a model, say what its KV looks like, turn text into tokens.

Names are imported from their modules: `common.model.folder.source` parses a spec for the command line, which
must answer before torch is loaded.
"""
