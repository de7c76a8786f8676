"""Gateways to the grid: processes that turn a utility's or an aggregator's messages into power budgets.

A gateway is a client of the coordinator, like the command line: it uses the stubs, not the service's code.
`dsx_flex` is pure: it interprets messages and decides what to do; `contract` reads and writes them. Around
these are the clients of the broker (`broker`) and of the coordinator (`power_client`), keys (`signing`), the
state that survives a restart (`journal`) and the process that ties them together (`agent`).
"""
