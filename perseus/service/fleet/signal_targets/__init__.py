"""Signal targets: slower while energy is dirty or expensive, faster while it is not. Pure."""
