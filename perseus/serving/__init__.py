"""Clocks for inference engines that keep latency objectives with the least energy. Pure, on numpy.

model        step time and watts by clock, fitted to measured steps
live         what live measurements change in it
stats        what an engine reports of an interval, and the objectives for its latencies
prediction   latencies and watts of the load at every clock
controller   events with the time in, clocks out
sources      what an instance's processes report, merged
scrape       the same from an engine's metrics
profile_csv  profiles as files
savings      what clocks save, measured against windows at stock
engine       an event-driven engine with continuous batching, for replays
replay       an engine, its requests, and a policy for its clock
"""
