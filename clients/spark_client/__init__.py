"""Client of the sparkd socket: depends on pyzmq and msgpack alone."""

from spark_client.client import Client, Stream, Usage
from spark_client.errors import ConnectionFailed, RequestFailed, SparkClientError
from spark_client.messages import Chunk, Finished, Progress, Timings

__all__ = [
    "Chunk",
    "Client",
    "ConnectionFailed",
    "Finished",
    "Progress",
    "RequestFailed",
    "SparkClientError",
    "Stream",
    "Timings",
    "Usage",
]
