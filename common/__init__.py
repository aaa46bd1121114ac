"""What both services need; each subpackage is named after the one concept it owns."""
