"""DSX Flex on the wire: what comes in, checked to the last field, and what goes out."""
