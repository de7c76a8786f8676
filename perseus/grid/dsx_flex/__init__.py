"""An agent for DSX Flex, version 1.7.0 of its contract. Pure.

`gateway` is the state machine: it takes load targets, feed readings and the time, and returns what to store,
to ask of the coordinator, and to publish. `schedule` decides which target applies when, `budgets` which
budgets the coordinator needs for that; `transitions` detects ramps, `breaches` power above a target.
"""
