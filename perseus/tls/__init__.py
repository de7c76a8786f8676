"""TLS for both ends of the wire: certificates from files, and diagnoses of failed connections.

gRPC makes the connections. This package reads the files and reloads them (`files`), opens channels with the
newest (`channels`), and diagnoses with Python's own `ssl` the failures that gRPC does not explain
(`diagnosis`).
"""
