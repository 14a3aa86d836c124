"""Serves metrics over HTTP, for Prometheus."""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from horovod_partial.metrics.job import JobMetrics

_MOST_CONNECTIONS = 16  # further ones are closed at once
_PATIENCE_SECONDS = 10.0  # a client that has connected, and sends nothing for this time, is disconnected
_POLL_SECONDS = 0.05  # how often the server looks whether it must end


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: there is one every few seconds."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # WSGIServer's method asks DNS for the host's name, for long maybe
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about a client that has gone, or is too slow."""

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class Endpoint:
    """A server of metrics at `http://host:port/metrics`. Its threads run Python only, and end with the process.

    The server's threads collect the metrics of `job` once for each request. Raises OSError if the server cannot listen
    there, RuntimeError if the process has too many threads, and ValueError if `host` cannot be an address.
    """

    def __init__(self, host: str, port: int, job: JobMetrics) -> None:
        registry = CollectorRegistry()
        registry.register(job)
        self._job = job
        self._server = _Server(host, port)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._server.server_close()
            raise

    def close(self) -> None:
        """End the server, and free the port. After this call no thread of the server reads the job's metrics."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._job.close()

    def close_in_child(self) -> None:
        """Free the port in a forked process, which has no thread of the server."""
        self._server.socket.close()
