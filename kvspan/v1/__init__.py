"""Stubs of the contract, generated from protos/; `make stubs` writes them, common.wire is their door."""
