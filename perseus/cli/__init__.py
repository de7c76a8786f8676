"""The command line: thin commands over the parts. It may import all of them; nothing imports it."""
