"""Engines that are built in."""
