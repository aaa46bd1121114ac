"""The parts of the `kvspan` command: one module per command, light to import.

What needs grpc or torch is imported by the function that runs, so that help and a bad flag answer at once.
"""
