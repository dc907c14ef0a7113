"""A server of files with the API of S3, whose answers take some time, and which counts requests and bytes.

It has one bucket, a folder, which clients only read. It runs in a process of its own, so that it doesn't hold the GIL
of a reader; on a machine with few cores, it takes some of their time all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The name of the bucket.
BUCKET = "bucket"
#: Address at which the server says what it has counted since it was last asked.
_COUNTS = "/counts"


class Counts(NamedTuple):
    """What a server has counted."""

    requests: int
    n_bytes: int


@dataclass
class Server:
    """A server that runs."""

    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which obstore and boto3 find it."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "S3_ENDPOINT_URL": self.url}

    def counts(self) -> Counts:
        """Return the requests and the bytes of answers since the last call."""
        with urlopen(self.url + _COUNTS) as answer:
            return Counts(*map(int, answer.read().split()))


@contextmanager
def serving(folder: Path, latency: float) -> Iterator[Server]:
    """Run a server of a folder, each of whose answers takes some seconds, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.libraries.server", str(folder), str(latency)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    try:
        yield Server(int(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait(10)


class _Answers:
    """Answers to the requests of all connections."""

    def __init__(self, folder: Path, latency: float) -> None:
        self._folder, self._latency = folder, latency
        self._requests = self._n_bytes = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            while request := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = request.split("\r\n")
                method, address, _ = first.split(" ")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                if address == _COUNTS:
                    self._write(writer, "200 OK", f"{self._requests} {self._n_bytes}".encode())
                    self._requests = self._n_bytes = 0
                else:
                    self._requests += 1
                    await asyncio.sleep(self._latency)
                    await self._answer(writer, method, address, headers)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has gone
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, address: str, headers: dict[str, str]) -> None:
        parts = urlsplit(address)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").strip("/")
        path = self._folder / key
        if "list-type" in (query := parse_qs(parts.query)):
            self._write(writer, "200 OK", self._listed(query), "Content-Type: application/xml")
            return
        if not key or not path.is_file():
            no_such = f"<Error><Code>NoSuchKey</Code><Message>{escape(key)}</Message></Error>".encode()
            self._write(writer, "404 Not Found", b"" if method == "HEAD" else no_such)
            return
        stat = path.stat()
        start, stop = 0, stat.st_size
        if wanted := headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, stop - int(last))
            stop = min(stop, int(last) + 1) if first and last else stop
        about = [
            f"ETag: {_etag(path, stat)}",
            f"Last-Modified: {formatdate(stat.st_mtime, usegmt=True)}",
            "Accept-Ranges: bytes",
            *([f"Content-Range: bytes {start}-{stop - 1}/{stat.st_size}"] if wanted else []),
        ]
        status = "206 Partial Content" if wanted else "200 OK"
        self._write(writer, status, None, *about, f"Content-Length: {stop - start}")
        if method == "GET":
            self._n_bytes += stop - start
            await writer.drain()
            with path.open("rb") as file:
                await asyncio.get_running_loop().sendfile(writer.transport, file, start, stop - start)

    def _listed(self, query: dict[str, list[str]]) -> bytes:
        """Return the files and folders below a prefix."""
        prefix, is_flat = query.get("prefix", [""])[0], "delimiter" not in query
        folder = self._folder / prefix
        found = sorted(folder.rglob("*") if is_flat else folder.iterdir()) if folder.is_dir() else []
        lines = []
        for path in found:
            key = escape(str(path.relative_to(self._folder)))
            if path.is_file():
                stat = path.stat()
                modified = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(timespec="seconds")
                lines.append(
                    f"<Contents><Key>{key}</Key><Size>{stat.st_size}</Size><ETag>{escape(_etag(path, stat))}</ETag>"
                    f"<LastModified>{modified}</LastModified></Contents>"
                )
            elif not is_flat:
                lines.append(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{len(lines)}</KeyCount>{''.join(lines)}"
        return f"{body}</ListBucketResult>".encode()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, status: str, body: bytes | None, *headers: str) -> None:
        lengths = [] if body is None else [f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, *lengths, "", ""]).encode() + (body or b""))


def _etag(path: Path, stat: os.stat_result) -> str:
    return '"' + hashlib.md5(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest() + '"'


async def _serve(folder: Path, latency: float) -> None:
    server = await asyncio.start_server(_Answers(folder, latency).talk, "127.0.0.1", 0, family=socket.AF_INET)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
