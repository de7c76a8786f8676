"""DSX Flex on the wire: reads and validates incoming messages, and writes outgoing ones."""
