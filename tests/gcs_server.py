"""A Google Cloud Storage in memory, with real generations and preconditions.

    with GcsServer() as server:
        cluster.run(body, 2, server.spec("runs/"), env=server.env)

It runs in a thread and listens on the loopback device only. Of the JSON API it has what reads,
writes, lists and deletes objects: https://cloud.google.com/storage/docs/json_api/v1
"""

import contextlib
import dataclasses
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.s3_server import Request, Watched


@dataclasses.dataclass(frozen=True)
class Answer:
    """What it is told."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class _Refusal(Exception):
    """The request cannot be carried out; the argument is the status."""


@dataclasses.dataclass(frozen=True)
class _Object:
    """An object, at one generation."""

    name: str
    data: bytes
    generation: int

    def described(self) -> dict[str, str]:
        """Its resource."""
        size = str(len(self.data))
        return {"name": self.name, "generation": str(self.generation), "size": size}


def _json(content: dict[str, Any], status: int = 200) -> Answer:
    """An answer with content."""
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _error(status: int) -> Answer:
    """An answer that is an error, or has a status only."""
    reason = {"code": status, "message": HTTPStatus(status).phrase}
    return _json({"error": reason}, status) if status >= 400 else Answer(status)


class GcsServer(Watched):
    """The server; `stop` is an outage: after another `start` it has the same URL and objects."""

    def __init__(self, buckets: tuple[str, ...] = ("bkt",), page_size: int = 1000) -> None:
        super().__init__()
        self._buckets: dict[str, dict[str, _Object]] = {bucket: {} for bucket in buckets}
        self._page_size = page_size
        self._generations = itertools.count(time.time_ns() // 1000)
        self._uploads: dict[str, tuple[Request, str, bytearray]] = {}
        self._lock = threading.Lock()
        self._port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def env(self) -> dict[str, str]:
        """What the environment of its clients must have; TensorStore reads it at each open."""
        return {"TENSORSTORE_GCS_HTTP_URL": self.url}

    def spec(self, path: str) -> dict[str, Any]:
        """What TensorStore opens; the environment must have `env`."""
        return {"driver": "gcs", "bucket": "bkt", "path": path}

    def start(self) -> None:
        """Listens."""
        self._http = _HttpServer(self._port, self.answer)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Hangs up, and refuses connections."""
        self._http.stop()

    def objects(self, bucket: str = "bkt") -> list[str]:
        """The names of its objects."""
        with self._lock:
            return sorted(self._buckets[bucket])

    def answer(self, request: Request) -> Answer:
        """Carries a request out, unless a fault says otherwise."""
        if status := self.before(request):
            return _error(status)
        try:
            answer = self._route(request)
        except _Refusal as refusal:
            answer = _error(refusal.args[0])
        status = self.after(request)
        return _error(status) if status else answer

    def _route(self, request: Request) -> Answer:
        """Finds who carries it out."""
        for method, pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and method == request.method:
                bucket, *names = map(unquote, match.groups())
                if bucket not in self._buckets:
                    raise _Refusal(404)
                with self._lock:
                    return handler(self, request, bucket, *names)
        raise _Refusal(404)

    def _list(self, request: Request, bucket: str) -> Answer:
        """A page of the objects."""
        query = request.query
        first = max(query.get("startOffset", ""), query.get("pageToken", ""))
        prefix, end = query.get("prefix", ""), query.get("endOffset")
        names = [name for name in sorted(self._buckets[bucket]) if name.startswith(prefix)]
        names = [name for name in names if name >= first and (not end or name < end)]
        size = int(query.get("maxResults", self._page_size))
        more = {"nextPageToken": names[size]} if len(names) > size else {}
        found = [self._buckets[bucket][name].described() for name in names[:size]]
        return _json({"kind": "storage#objects", "items": found, **more})

    def _read(self, request: Request, bucket: str, name: str) -> Answer:
        """An object, or a range of it, or what it is."""
        found = self._buckets[bucket].get(name)
        if found is None:
            raise _Refusal(404)
        _check(request.query, found, otherwise=304)
        if request.query.get("alt") != "media":
            return _json(found.described())
        headers = {"x-goog-generation": str(found.generation)}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if asked is None or not found.data:
            return Answer(200, found.data, headers)
        return _part(found.data, *asked.groups(), headers)

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        """Deletes an object."""
        _check(request.query, self._buckets[bucket].get(name))
        if self._buckets[bucket].pop(name, None) is None:
            raise _Refusal(404)
        return Answer(204)

    def _upload(self, request: Request, bucket: str) -> Answer:
        """An upload: in one request, with its name in a part of its own, or begun."""
        kind = request.query.get("uploadType", "media")
        if kind == "media":
            return self._store(request, bucket, request.query["name"], request.body)
        if kind == "multipart":
            described, data = _parts(request)
            return self._store(request, bucket, json.loads(described)["name"], data)
        described = json.loads(request.body or b"{}")
        name = described.get("name") or request.query["name"]
        upload = f"upload-{len(self._uploads)}"
        self._uploads[upload] = request, name, bytearray()
        return Answer(200, headers={"Location": f"{self.url}{request.path}?upload_id={upload}"})

    def _go_on(self, request: Request, bucket: str) -> Answer:
        """More of an upload; a size that is not known yet, `*`, says that there is more."""
        begun, name, data = self._uploads[request.query["upload_id"]]
        data += request.body
        if request.headers.get("content-range", "").endswith("/*"):
            return Answer(308, headers={"Range": f"bytes=0-{len(data) - 1}"})
        return self._store(begun, bucket, name, bytes(data))

    def _store(self, request: Request, bucket: str, name: str, data: bytes) -> Answer:
        """Makes an object of `data`."""
        _check(request.query, self._buckets[bucket].get(name))
        stored = _Object(name, data, next(self._generations))
        self._buckets[bucket][name] = stored
        return _json(stored.described())


_OBJECTS = r"/storage/v1/b/([^/]+)/o"
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", _OBJECTS, GcsServer._list),
    ("GET", rf"(?:/download)?{_OBJECTS}/(.+)", GcsServer._read),
    ("DELETE", rf"{_OBJECTS}/(.+)", GcsServer._delete),
    ("POST", rf"/upload{_OBJECTS}", GcsServer._upload),
    ("PUT", rf"/upload{_OBJECTS}", GcsServer._go_on),
]


def _check(query: dict[str, str], found: _Object | None, otherwise: int = 412) -> None:
    """Checks the preconditions; the generation of an object that is missing is 0."""
    generation = str(found.generation if found else 0)
    if query.get("ifGenerationMatch", generation) != generation:
        raise _Refusal(412)
    if query.get("ifGenerationNotMatch") == generation:
        raise _Refusal(otherwise)


def _part(data: bytes, first: str, last: str, headers: dict[str, str]) -> Answer:
    """The bytes of a range: `first-last`, `first-`, or the `-last` ones."""
    size = len(data)
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        return Answer(416, headers={"Content-Range": f"bytes */{size}"})
    where = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Answer(206, data[start:stop], headers | where)


def _parts(request: Request) -> list[bytes]:
    """The contents of the parts of a multipart upload, without their headers."""
    boundary = re.search(r'boundary="?([^";]+)', request.headers["content-type"])[1]
    parts = request.body.split(b"--" + boundary.encode())[1:-1]
    return [part.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n") for part in parts]


class _Handler(BaseHTTPRequestHandler):
    """A connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: "_HttpServer"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle_expect_100(self) -> bool:
        """Says at once that the body may come: the client waits a second for it."""
        go_on = super().handle_expect_100()
        self.wfile.flush()
        return go_on

    def _handle(self) -> None:
        answer = self.server.answer(self._request())
        self.send_response(answer.status)
        length = {} if answer.status in (204, 304) else {"Content-Length": str(len(answer.body))}
        for name, value in (answer.headers | length).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _request(self) -> Request:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        return Request(self.command, url.path, query, headers, body)


class _HttpServer(ThreadingHTTPServer):
    """The socket and its connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, answer: Callable[[Request], Answer]) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Notes a connection."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forgets it."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of the server."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        """Closes everything."""
        self.shutdown()
        self.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
