"""TLS for both ends of the wire: certificates from files, and what is wrong when nobody gets through.

gRPC makes the connections. This room reads the files and keeps them fresh (`files`), opens channels with the
newest (`channels`), and finds out with Python's own `ssl` what gRPC does not say (`diagnosis`).
"""
