"""An S3 in memory: the server of moto, whose requests are listed and can be made to fail.

    with S3Server() as server:
        cluster.run(body, 2, server.spec("runs/"), env=server.env)

It runs in a thread and listens on the loopback device only.
"""

import dataclasses
import logging
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qsl

BUCKET = "bkt"


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asks for; the names of headers are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = dataclasses.field(default=b"", repr=False)


Fault = Callable[[Request], int | float | None]


class Watched:
    """A server whose requests are listed, and can be made to fail.

    A fault returns the status to answer with (an int), for how many seconds to sleep (a float), or
    None. It is called by several threads.

    Attributes:
      log: all requests, without their bodies.
      sent: how many bytes all answers had, where the server counts them.
      fail: a fault in place of the request.
      lose: a fault after the request was carried out, whose answer is lost.
    """

    fail: Fault | None = None
    lose: Fault | None = None

    def __init__(self) -> None:
        self.log: list[Request] = []
        self.sent = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listens."""
        raise NotImplementedError

    def stop(self) -> None:
        """Refuses connections."""
        raise NotImplementedError

    def count(self, method: str, path: str = "") -> int:
        """How many requests there were with this method, and `path` in their path."""
        return sum(r.method == method and path in r.path for r in self.log)

    def before(self, request: Request) -> int | None:
        """Notes the request; the status that it gets instead of being carried out."""
        self.log.append(dataclasses.replace(request, body=b""))
        return _status(self.fail, request)

    def after(self, request: Request) -> int | None:
        """The status that replaces the answer."""
        return _status(self.lose, request)


def _status(fault: Fault | None, request: Request) -> int | None:
    """What `fault` says, after its sleep."""
    outcome = fault(request) if fault is not None else None
    if isinstance(outcome, float):
        time.sleep(outcome)
        return None
    return outcome


class S3Server(Watched):
    """The server, with an empty bucket. There can be one at a time: they share their objects.

    Attributes:
      env: what the environment of its clients must have.
    """

    env: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret"}

    def start(self) -> None:
        """Listens in a thread."""
        from moto.server import ThreadedMotoServer  # this takes a second

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        http = self._moto._server
        self._call("POST", "/moto-api/reset")
        self._call("PUT", f"/{BUCKET}")
        http.app = _Watch(self, http.app)

    def stop(self) -> None:
        """Refuses connections; the next start forgets the objects."""
        self._moto.stop()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        host, port = self._moto.get_host_and_port()
        return f"http://{host}:{port}"

    def spec(self, path: str) -> dict[str, Any]:
        """What TensorStore opens; the environment must have `env`."""
        return {
            "driver": "s3",
            "bucket": BUCKET,
            "path": path,
            "endpoint": self.endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
        }

    def _call(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}{path}", b"", method=method)
        urllib.request.urlopen(request).close()


class _Watch:
    """The application of `server`, with its faults."""

    def __init__(self, server: Watched, app: Callable[..., Iterable[bytes]]) -> None:
        self._server, self._app = server, app

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = _request(environ)
        status = self._server.before(request)
        said: list[tuple[Any, ...]] = []
        if status is None:
            answer = list(self._app(environ, lambda *heading: said.append(heading)))
            status = self._server.after(request)
        if status is None:
            start(*said[-1])
            self._server.sent += sum(map(len, answer))
            return answer
        start(f"{status} {HTTPStatus(status).phrase}", [("Content-Length", "0")])
        return []


def _request(environ: dict[str, Any]) -> Request:
    """The request of WSGI, without its body."""
    query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
    headers = {
        name.removeprefix("HTTP_").replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    return Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], query, headers)
