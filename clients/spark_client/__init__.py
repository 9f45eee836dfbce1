"""Client of the sparkd socket: depends on pyzmq and msgpack alone."""

from spark_client.async_client import AsyncClient, AsyncStream
from spark_client.client import Client, Stream
from spark_client.errors import ConnectionFailed, RequestFailed, SparkClientError
from spark_client.messages import Choice, Chunk, Finished, Part, Progress, Timings
from spark_client.output import Call, Usage
from spark_client.requests import Parameters

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Call",
    "Choice",
    "Chunk",
    "Client",
    "ConnectionFailed",
    "Finished",
    "Parameters",
    "Part",
    "Progress",
    "RequestFailed",
    "SparkClientError",
    "Stream",
    "Timings",
    "Usage",
]
