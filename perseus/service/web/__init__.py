"""What the coordinator serves over HTTP, on the event loop that gRPC has: its metrics.

app         the routes, and what is answered where something is wrong
access      who asks, and whether they may
listening   the address, plaintext or TLS with certificates that are renewed
scrape      one answer for all who ask at once
collector   the coordinator's state, as readings
"""
