"""Metrics in Prometheus' formats, of coordinator and agent: their names, and the writing of a scrape.

Nothing here counts. The other modules keep their numbers as state; at a scrape a collector reads them
(`perseus.service.web.collector`, `perseus.agent.sidecar.metrics_server`) into `Readings`.
"""
