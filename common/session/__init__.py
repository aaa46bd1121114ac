"""The session between the two services as pure state machines: no I/O, no clock, no threads.

Start at `decode_side.py` and `prefill_side.py`; docs/protocol.md tells the same as prose.
"""
