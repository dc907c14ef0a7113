"""A server in this process with the API of S3, which can fail or be slow."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import obstore
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Server", "serving"]


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Log nothing."""


class Server:
    """A server that answers as moto does, except within `failing` and `slow`."""

    def __init__(self) -> None:
        self._answer = DomainDispatcherApplication(create_backend_app)
        self._takes = 0.0
        self._fails_when: Callable[[], bool] = lambda: False
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
        }

    def __call__(self, environ: Any, start_response: Any) -> Any:
        time.sleep(self._takes)
        if self._fails_when():
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        return self._answer(environ, start_response)

    def put(self, folder: Path, bucket: str, prefix: str) -> None:
        """Put the files of a folder into a bucket, and create the bucket if necessary."""
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        store = S3Store(bucket, endpoint=self.url, client_options={"allow_http": True}, config=keys)
        urlopen(Request(f"{self.url}/{bucket}", method="PUT")).close()
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path)

    @contextmanager
    def failing(self, *, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Fail within a context, whenever a condition is true."""
        self._fails_when = when
        try:
            yield
        finally:
            self._fails_when = lambda: False

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Answer within a context, after the timeout of the tests' clients."""
        self._takes = 2.0
        try:
            yield
        finally:
            self._takes = 0.0


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server within a context."""
    server = Server()
    thread = threading.Thread(target=server._server.serve_forever, daemon=True)
    thread.start()
    # moto keeps the buckets of all servers of a process, also from earlier tests
    urlopen(Request(f"{server.url}/moto-api/reset", method="POST")).close()
    try:
        yield server
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join()
