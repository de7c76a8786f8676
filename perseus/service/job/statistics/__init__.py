"""Learned noise, and sequential evidence of changes against it. Pure."""
