"""Doors for the grid: processes that turn a utility's or an aggregator's messages into power budgets.

A door is a client of the coordinator, as the command line is: it knows the stubs, and nothing of the service.
`dsx_flex` is pure: what messages mean, and what is to be done about them; `contract` reads and writes them.
Around these are the broker (`broker`), the coordinator (`power_client`), keys (`signing`), what outlasts a
restart (`journal`) and the process that ties them (`agent`).
"""
