"""The coordinator's HTTP server, on the same event loop as gRPC: its metrics, and the live page.

app         the routes, put together
errors      refusals and failures as HTTP statuses and JSON
access      authentication of requests
sessions    logins of browsers
origin      protection against requests from other sites' pages
listening   the address, plaintext or TLS with certificates that can be renewed
http_port   the connections, and their limits

scrape      one response for all simultaneous scrapes
collector   the coordinator's state, as readings

page_files  the page's files
page_api    the page's requests
json_text   messages as JSON
single_flight_cache   expensive responses, made once for all readers
other_slots  who serves which slot of a fleet, and the jobs of other slots
rank_grid   all ranks of a job in columns
event_stream   streams of server-sent events, each made once for all its readers
event_sources  the sources of these streams: the list of jobs, one job
"""
