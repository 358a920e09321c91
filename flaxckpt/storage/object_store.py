"""How object stores are reached: the settings, and what TensorStore makes of them.

https://google.github.io/tensorstore/kvstore/s3/index.html
https://google.github.io/tensorstore/kvstore/gcs/index.html
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from flaxckpt.errors import DirectoryError

# Without a number TensorStore repeats a request 32 times, which takes a quarter of an hour.
FIRST_DELAY, LONGEST_DELAY = "500ms", "8s"
_CREDENTIALS = re.compile(r"environment|anonymous|profile:.+")
_URL = re.compile(r"(s3|gs)://([^/]+)/?(.*)")


@dataclasses.dataclass(frozen=True)
class ObjectStore:
    """How object stores are reached.

    Attributes:
      endpoint: the URL of a server that speaks S3; by default that of AWS. (For another server of
        GCS, set the environment variable `TENSORSTORE_GCS_HTTP_URL`.)
      region: of an S3 bucket; by default AWS is asked for it.
      credentials: for S3: `environment` for `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`,
        `anonymous`, or `profile:name`; by default what AWS's own tools would use. GCS uses
        Google's application default credentials.
      retries: how often a request is repeated that failed for a passing reason, after half a
        second, then one, two, four and at most eight.
      timeout_secs: how long the answer to a request is waited for, in seconds, with all its
        repetitions; at most `Options.timeout_secs`. A request moves at most 48 MiB.

    Raises:
      ValueError: when one of them is none of these.

    Example:
      >>> import flaxckpt
      >>> store = flaxckpt.ObjectStore(endpoint="http://minio:9000", region="us-east-1")
      >>> flaxckpt.Options(storage=store).storage.retries
      8
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None
    retries: int = 8
    timeout_secs: float = 300.0

    def __post_init__(self) -> None:
        """Refuses what TensorStore would refuse later, or misunderstand."""
        if self.endpoint is not None and not re.match("https?://.", self.endpoint):
            raise ValueError(f"ObjectStore.endpoint must be an http URL, got {self.endpoint!r}")
        if self.credentials is not None and not _CREDENTIALS.fullmatch(self.credentials):
            raise ValueError(
                "ObjectStore.credentials must be environment, anonymous or profile:name, got "
                f"{self.credentials!r}"
            )
        if self.retries < 0 or not self.timeout_secs > 0:
            raise ValueError(
                "ObjectStore.retries must not be negative, and timeout_secs positive, got "
                f"{self.retries} and {self.timeout_secs}"
            )


def is_url(path: str) -> bool:
    """Whether `path` is the URL of something in an object store."""
    return _URL.fullmatch(path) is not None


def split_url(url: str) -> tuple[str, str, str]:
    """The scheme, the bucket and the key of a URL.

    Raises:
      DirectoryError: when it is none, or its key has empty, `.` or `..` parts.

    Example:
      >>> split_url("s3://bucket/runs/mnist")
      ('s3', 'bucket', 'runs/mnist')
    """
    found = _URL.fullmatch(url)
    key = found[3].rstrip("/") if found else ""
    if found is None or (key and {"", ".", ".."} & set(key.split("/"))):
        raise DirectoryError(f"{url} is no URL of an object store. Give s3://bucket/path.")
    return found[1], found[2], key


def driver_spec(scheme: str, bucket: str, settings: ObjectStore) -> dict[str, Any]:
    """What TensorStore opens.

    Raises:
      DirectoryError: when the store has no such setting.
    """
    if scheme == "s3":
        spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "use_conditional_write": True}
        if settings.endpoint is not None:
            spec["endpoint"] = settings.endpoint
        if settings.region is not None:
            spec["aws_region"] = settings.region
        return spec
    if (settings.endpoint, settings.region, settings.credentials) != (None, None, None):
        raise DirectoryError(
            f"gs://{bucket} takes no endpoint, region or credentials in Options(storage=...): they "
            "come from the environment (TENSORSTORE_GCS_HTTP_URL, Google's default credentials). "
            "Set them there."
        )
    return {"driver": "gcs", "bucket": bucket}


def context_spec(scheme: str, settings: ObjectStore) -> dict[str, Any]:
    """What all that is opened in one store shares."""
    retries = {
        "max_retries": settings.retries,
        "initial_delay": FIRST_DELAY,
        "max_delay": LONGEST_DELAY,
    }
    if scheme == "gs":
        return {"gcs_request_retries": retries}
    spec: dict[str, Any] = {"s3_request_retries": retries}
    if settings.credentials is not None:
        kind, _, profile = settings.credentials.partition(":")
        spec["aws_credentials"] = {"type": kind} | ({"profile": profile} if profile else {})
    return spec
