"""Scrape a URL for each line on standard input: `python -m benchmarks.load.scraper URL`.

It prints a line of JSON for each scrape: the answer's time in seconds, its series and its bytes.
"""

import json
import sys
import time
import urllib.request


def _scrape(url: str) -> tuple[float, int, int]:
    began_s = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    took_s = time.monotonic() - began_s
    return took_s, sum(not line.startswith("#") for line in text.splitlines()), len(text)


if __name__ == "__main__":
    for _ in sys.stdin:
        print(json.dumps(_scrape(sys.argv[1])), flush=True)
