"""A prefill engine that computes with OpenVINO; `factory.py` is what the entry point names."""
