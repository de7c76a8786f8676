"""What the coordinator serves over HTTP, on the event loop that gRPC has: its metrics, and the live page.

app         the routes, put together
errors      what is answered where something is wrong
access      who asks, and whether they may
sessions    who has logged in
origin      whether it is our own page that asks
listening   the address, plaintext or TLS with certificates that are renewed

scrape      one answer for all who ask at once
collector   the coordinator's state, as readings

page_files  the page's files
page_api    what the page asks
json_text   messages as JSON
shared      answers that are made once for all
rank_grid   all ranks of a job in columns
event_stream   streams of server-sent events, each made once for all its readers
event_sources  what they are made of: the list of jobs, one job
"""
