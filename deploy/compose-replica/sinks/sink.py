"""Stand-ins for the two servers that a worker reports to: a metric server and a billing receiver.

`python sink.py metric-server PORT TOKEN_FILE` or `python sink.py billing PORT`. They take what the contract says
(docs/telemetry), print a line for each batch, and tell at `GET /` what has come. Not here: storage; a restart forgets.
"""

import json
import signal
import sys
from collections import Counter, OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

MOST_EVENTS = 100_000
MOST_BYTES = 16 * 1024 * 1024

Seen = dict[str, object]


class MetricServer:
    """`POST /metrics`: counts what became of the requests."""

    path = "/metrics"

    def __init__(self, token: str) -> None:
        self.authorization = f"Bearer {token}"
        self._dispositions: Counter[str] = Counter()
        self._batches = 0

    def take(self, batch: dict[str, object]) -> str:
        requests = batch["requests"]
        assert isinstance(requests, list)
        self._batches += 1
        self._dispositions.update(request["disposition"] for request in requests)
        return f"{batch['replica_id']}: {len(requests)} requests, {batch['queue_depth']} waiting"

    def seen(self) -> Seen:
        return {"batches": self._batches, "dispositions": self._dispositions}


class Billing:
    """`POST /events`: counts each event id once, as a receiver of at-least-once delivery must."""

    path = "/events"
    authorization = None

    def __init__(self) -> None:
        self._events: OrderedDict[str, int] = OrderedDict()
        self._repeated = self._tokens = self._distinct = 0

    def take(self, events: list[dict[str, object]]) -> str:
        new = 0
        for event in events:
            key, data = f"{event['source']} {event['id']}", event["data"]
            assert isinstance(data, dict)
            if key in self._events:
                self._repeated += 1
                continue
            new += 1
            self._distinct += 1
            self._events[key] = int(data["total_tokens"])
            self._tokens += self._events[key]
            if len(self._events) > MOST_EVENTS:
                self._events.popitem(last=False)
        return f"{new} new events of {len(events)}"

    def seen(self) -> Seen:
        return {"distinct": self._distinct, "repeated": self._repeated, "tokens": self._tokens}


def handler(sink: MetricServer | Billing) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of one sink."""
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with lock:
                self._answer(200, json.dumps(sink.seen()).encode())

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", MOST_BYTES))
            if size >= MOST_BYTES:
                self.close_connection = True
                return self._answer(413)
            body = self.rfile.read(size)
            if self.path != sink.path:
                return self._answer(404)
            if sink.authorization is not None and self.headers.get("Authorization") != sink.authorization:
                return self._answer(401)
            try:
                with lock:
                    said = sink.take(json.loads(body))
            except (AssertionError, KeyError, TypeError, ValueError) as exc:
                print(f"refused: {exc!r}", flush=True)
                return self._answer(400)
            print(said, flush=True)
            return self._answer(204)

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """One line a batch is enough."""

    return Handler


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM, which the first process of a container would else not even notice."""
    signal.signal(signal.SIGTERM, _stop)
    kind, port = arguments[0], int(arguments[1])
    sink = MetricServer(Path(arguments[2]).read_text().strip()) if kind == "metric-server" else Billing()
    ThreadingHTTPServer(("", port), handler(sink)).serve_forever()


def _stop(*_: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
