"""Measuring stages clock by clock while training goes on. Pure."""
