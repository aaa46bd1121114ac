"""Replays journals of both services and names every rule that was broken."""
