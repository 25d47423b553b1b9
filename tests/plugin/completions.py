"""A server that answers /v1/completions from a function, and counts as vLLM does."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """\
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {0}
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {1}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {2}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {3}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {1}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {4}
"""


@dataclass
class Completions:
    """Ten drafts of two tokens an answer: the first is kept always, the second half the time."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def answering(answer: Callable[[dict[str, Any]], str]) -> Iterator[Completions]:
    """Serve `answer(body)` as the text of every completion."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/metrics":
                n = 10 * (1 + len(served.bodies))
                self._send(METRICS.format(n, n, 2 * n, 1.5 * n, 0.5 * n).encode())
            elif self.path == "/v1/models":
                model = {"id": "m", "max_model_len": 512}
                self._send(json.dumps({"data": [model]}).encode())
            else:
                self.send_error(404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.bodies.append(body)
            choice = {"index": 0, "text": answer(body)}
            self._send(json.dumps({"choices": [choice]}).encode())

        def _send(self, page: bytes):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Completions(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
