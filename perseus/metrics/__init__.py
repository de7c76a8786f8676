"""Metrics in Prometheus' formats, of both processes: their names, and how a scrape is written.

Nothing here counts. Those who do something keep their numbers as state; at a scrape a collector reads them
(`perseus.service.web.collector`, `perseus.agent.sidecar.metrics_server`) into `Readings`.
"""
