"""What an engine and a backend are; both services know no more of them than this package says."""
