"""Classifies photographs over HTTP, on this machine alone; no part of Trainyard's interface.

python examples/serve.py runs/digits
curl --data-binary @photo.jpg http://127.0.0.1:8000
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import trainyard

MOST_BYTES = 100 * 2**20
ADDRESS = "127.0.0.1"


class Handler(BaseHTTPRequestHandler):
    """Answers a POST of an image file with its five likeliest classes, as JSON."""

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        try:
            content = self.rfile.read(size) if size <= MOST_BYTES else b""
            guesses = classifier.predict(content)[0]
            code, answer = 200, json.dumps([guess._asdict() for guess in guesses])
        except trainyard.TrainyardError as error:  # such as no image
            code, answer = 400, json.dumps({"error": str(error)})
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())


if __name__ == "__main__":
    classifier = trainyard.load(sys.argv[1])
    with HTTPServer((ADDRESS, int(sys.argv[2]) if len(sys.argv) > 2 else 8000), Handler) as server:
        print(f"http://{ADDRESS}:{server.server_port}", flush=True)
        server.serve_forever()
