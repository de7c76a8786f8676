"""Measuring stages clock by clock while training continues. Pure."""
