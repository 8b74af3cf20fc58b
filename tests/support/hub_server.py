"""Hugging Face's hub on loopback: it serves a folder byte for byte, and answers as huggingface_hub expects it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


@dataclass
class Hub:
    """A running hub: the value of HF_ENDPOINT, and the files that were downloaded from it."""

    endpoint: str
    downloaded: set[str] = field(default_factory=set)


@contextmanager
def hub_of(name: str, folder: Path) -> Iterator[Hub]:
    """Serve the model `name`, whose files are in a folder."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    commit = hashlib.sha1(name.encode()).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            wanted = parse_qs(asked).get("paths") or json.loads(asked)["paths"]
            self._send(json.dumps([listed(path) for path in wanted if path in files]).encode())

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            revisions = ("main", commit)
            resolved = {f"/{name}/resolve/{revision}/{file}": file for revision in revisions for file in files}
            if file := resolved.get(path):
                self._send(files[file].read_bytes(), file=file)
            elif path in {f"/api/models/{name}", *(f"/api/models/{name}/revision/{each}" for each in revisions)}:
                siblings = [{"rfilename": each} for each in files]
                self._send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
            elif path in {f"/api/models/{name}/tree/{each}" for each in revisions}:
                self._send(json.dumps([listed(each) for each in files]).encode())
            else:
                self._send(b'{"error": "Entry not found"}', status=404)

        def _send(self, content: bytes, *, status: int = 200, file: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Repo-Commit", commit)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            if file:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
                if file:
                    hub.downloaded.add(file)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the tests' output is for what fails."""

    def listed(path: str) -> dict[str, object]:
        content = files[path].read_bytes()
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
