"""Prompts as token ids and answers as text."""
