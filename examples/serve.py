"""Classifies photographs over HTTP, on this machine alone; no part of Trainyard's interface.

python examples/serve.py runs/digits         or digits-int8.onnx, or another exported file
curl --data-binary @photo.jpg http://127.0.0.1:8000
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import trainyard

MOST_BYTES = 100 * 2**20
ADDRESS = "127.0.0.1"
ONE_AT_A_TIME = threading.Lock()  # each prediction takes all cores


class Handler(BaseHTTPRequestHandler):
    """Answers a POST of an image file with its five likeliest classes, as JSON."""

    timeout = 30  # seconds for which a client may send nothing

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() and len(length) < 10 else MOST_BYTES + 1
        try:
            content = self.rfile.read(size) if size <= MOST_BYTES else b""
            with ONE_AT_A_TIME:
                guesses = classifier.predict(content)[0]
            code, answer = 200, json.dumps([guess._asdict() for guess in guesses])
        except trainyard.TrainyardError as error:  # such as no image
            code, answer = 400, json.dumps({"error": str(error)})
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())


def serve(port: int) -> ThreadingHTTPServer:
    """A server with a thread for each client."""
    return ThreadingHTTPServer((ADDRESS, port), Handler)


if __name__ == "__main__":
    load = trainyard.load_export if Path(sys.argv[1]).is_file() else trainyard.load
    classifier = load(sys.argv[1])
    with serve(int(sys.argv[2]) if len(sys.argv) > 2 else 8000) as server:
        print(f"http://{ADDRESS}:{server.server_port}", flush=True)
        server.serve_forever()
