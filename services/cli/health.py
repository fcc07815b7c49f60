"""The command `health`, for health checks of containers: asks a server whether it can serve."""

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge.errors import InvalidField
from draftbridge import CallError, Credentials
from draftbridge.client import checked_address
from draftbridge.messages import checked_timeout
from draftbridge.security import open_channel
from services.cli.connection import connecting
from services.cli.terminal import fail
from services.config import DEFAULT_BRIDGE


@connecting
def health(
    credentials: Credentials,
    server: Annotated[
        str, typer.Argument(help="HOST:PORT of a bridge or model server.", envvar="DRAFTBRIDGE_CLIENT_SERVER")
    ] = DEFAULT_BRIDGE,
    service: Annotated[
        str, typer.Option(help="Name of one service, as draftbridge.v1.TargetService; by default the whole server.")
    ] = "",
    server_name: Annotated[
        str,
        typer.Option(
            help="Name in the server's certificate, if it is not HOST.", envvar="DRAFTBRIDGE_CLIENT_SERVER_NAME"
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Ask a server whether it can serve: exit status 0 if so, else 1. Needs no token."""
    checked_address(server)
    limit = checked_timeout(timeout)
    for name, text in (("--service", service), ("--server-name", server_name)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidField(name, "valid UTF-8", "other bytes") from None
    options = [("grpc.ssl_target_name_override", server_name)] if server_name and credentials.encrypted else []
    with open_channel(server, credentials, options) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=limit)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                fail(f"{server} has no service {service!r}: `draftbridge health {server}` checks the whole server")
            raise CallError.from_rpc(error, server) from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        fail(f"{server} cannot serve now: its health is {status}")
    print(status)
