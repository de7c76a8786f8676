"""Generated stubs of the wire contract in protos/perseus/v1; `make protos` writes them."""
