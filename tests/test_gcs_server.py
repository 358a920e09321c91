"""The server of Google Cloud Storage; what TensorStore finds in it is in test_s3_server.py."""

import json
import threading
import urllib.error
import urllib.request

import pytest
import tensorstore as ts

from tests.gcs_server import GcsServer

pytestmark = pytest.mark.slow

RETRIES = {"max_retries": 50, "initial_delay": "20ms", "max_delay": "40ms"}
CONTEXT = {"gcs_request_retries": RETRIES}


@pytest.fixture
def server(monkeypatch):
    with GcsServer(page_size=2) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def store(server):
    return ts.KvStore.open(server.spec("run/"), context=ts.Context(CONTEXT)).result()


def call(server, method, path, body=None, **headers):
    """The status, headers and body of the answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{server.url}{path}", body, names, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.status, answer.headers, answer.read()


def test_a_list_has_pages(server, store):
    for number in range(5):
        store.write(f"{number}", b"").result()
    server.log.clear()
    assert store.list().result() == [b"0", b"1", b"2", b"3", b"4"]
    assert server.count("GET", "/o") == 3
    assert server.objects() == [f"run/{number}" for number in range(5)]


def test_generations_never_come_again(server):
    upload = "/upload/storage/v1/b/bkt/o?uploadType=media&name=a"
    generations = []
    for _ in range(2):
        status, _, body = call(server, "POST", f"{upload}&ifGenerationMatch=0", b"x")
        assert status == 200
        generations.append(json.loads(body)["generation"])
        now = f"/storage/v1/b/bkt/o/a?ifGenerationMatch={generations[-1]}"
        assert call(server, "GET", now)[0] == 200
        assert call(server, "POST", f"{upload}&ifGenerationMatch=0", b"y")[0] == 412
        assert call(server, "DELETE", now + "0")[0] == 412
        assert call(server, "DELETE", now)[0] == 204
        assert call(server, "DELETE", now)[0] == 412
    assert generations[0] < generations[1]


def test_an_upload_in_parts(server):
    path = "/upload/storage/v1/b/bkt/o?uploadType=multipart"
    parts = [b'{"name": "a"}', b"\0\r\n--data\r\n"]
    body = b"".join(b"--xyz\r\nContent-Type: any\r\n\r\n" + part + b"\r\n" for part in parts)
    kind = "multipart/related; boundary=xyz"
    assert call(server, "POST", path, body + b"--xyz--", Content_Type=kind)[0] == 200
    assert call(server, "GET", "/storage/v1/b/bkt/o/a?alt=media")[2] == parts[1]


def test_an_upload_that_goes_on(server):
    path = "/upload/storage/v1/b/bkt/o?uploadType=resumable&name=a&ifGenerationMatch=0"
    _, headers, _ = call(server, "POST", path, b"{}")
    going_on = headers["Location"].removeprefix(server.url)
    status, headers, _ = call(server, "PUT", going_on, b"ab", Content_Range="bytes 0-1/*")
    assert (status, headers["Range"]) == (308, "bytes=0-1")
    assert server.objects() == []
    assert call(server, "PUT", going_on, b"c", Content_Range="bytes 2-2/3")[0] == 200
    assert call(server, "GET", "/storage/v1/b/bkt/o/a?alt=media")[2] == b"abc"


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [("2-3", 206, b"cd"), ("4-99", 206, b"ef"), ("-2", 206, b"ef"), ("6-7", 416, b"")],
)
def test_ranges(asked, status, body, server, store):
    store.write("a", b"abcdef").result()
    path = "/storage/v1/b/bkt/o/run%2Fa?alt=media"
    assert call(server, "GET", path, Range=f"bytes={asked}")[::2] == (status, body)


def test_what_is_unknown_is_not_found(server):
    assert call(server, "GET", "/storage/v1/b/other/o")[0] == 404
    assert call(server, "GET", "/storage/v1/b/bkt/o/a")[0] == 404
    assert call(server, "GET", "/elsewhere")[0] == 404


def test_an_outage_ends(server, store):
    store.write("a", b"1").result()
    server.stop()
    threading.Timer(0.3, server.start).start()
    assert store.read("a").result().value == b"1"
