"""A page that is open, without a browser: asks a server what the page asks, as often, until its input ends.

Prints a line once looks come, and at the end how many calls were answered. Must not know what is compared meanwhile.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import urllib.parse

SLOW_S = 5.0
HISTORY = "/v1/history?most=300"
SLOW = ("/v1/prefixes?sort=hottest&search=&offset=0&limit=10", "/v1/processes", "/v1/savings")
"""Asked every `SLOW_S`."""
STREAM = "/v1/events"
TIMEOUT_S = 60.0


class Page:
    """One page. address: of a server."""

    def __init__(self, address: str) -> None:
        self._address = urllib.parse.urlsplit(address).netloc
        self.answered = 0
        self.looks = 0
        self._asked = threading.Event()

    def load(self) -> None:
        """What comes first: the page's files, the server, the last minutes."""
        from kvstore.tools.api import FILES

        for path in ("/", *(f"/page/{name}" for name in FILES if not name.endswith(".html")), "/v1/server", HISTORY):
            self._get(path)

    def ask_slowly(self, ended: threading.Event) -> None:
        """The calls that are made again and again."""
        while True:
            for path in SLOW:
                self._get(path)
            self._asked.set()
            if ended.wait(SLOW_S):
                return

    def follow(self, ended: threading.Event) -> None:
        """The stream of looks."""
        line = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        line.request("GET", STREAM)
        stream = line.getresponse()
        while not ended.is_set() and (text := stream.readline()):
            if text.startswith(b"data:"):
                json.loads(text[5:])
                self.looks += 1
                if self.looks == 1:
                    self._asked.wait(TIMEOUT_S)
                    print("open", flush=True)
        line.close()

    def _get(self, path: str) -> None:
        line = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        line.request("GET", path)
        answer = line.getresponse()
        answer.read()
        line.close()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status}")
        self.answered += 1


def main() -> None:
    """Ask until the input ends."""
    page, ended = Page(sys.argv[1]), threading.Event()
    page.load()
    work = [threading.Thread(target=one, args=(ended,), daemon=True) for one in (page.ask_slowly, page.follow)]
    for one in work:
        one.start()
    sys.stdin.read()
    ended.set()
    print(json.dumps({"calls": page.answered, "looks": page.looks}), flush=True)


if __name__ == "__main__":
    main()
