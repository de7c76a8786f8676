"""What DSX Flex, version 1.7.0 of its contract, asks of an agent. Pure.

`door` is the machine: it takes load targets, how feeds stand and the time, and says what is to be kept, asked
of the coordinator, and published. `schedule` finds out which target counts when, `budgets` what the
coordinator has to be asked for that, `transitions` what happens on a feed, and `breaches` when that is too
much.
"""
