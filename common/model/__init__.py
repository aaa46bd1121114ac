"""The only door to transformers: load a model, say what its KV looks like, turn text into tokens."""

from common.model.loader import LoadedModel, load_model, resolve_dtype
from common.model.stops import StopMatcher
from common.model.text import TextStream, Tokenizer

__all__ = ["LoadedModel", "StopMatcher", "TextStream", "Tokenizer", "load_model", "resolve_dtype"]
