"""Clocks for inference engines that keep latency objectives with the least energy. Pure, on numpy.

model        step time and watts by clock, fitted to measured steps
live         what live measurements change in it
stats        what an engine reports of an interval, and the objectives for its latencies
"""
