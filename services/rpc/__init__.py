"""gRPC: servers, streams, status codes, limits and the codec. Protocol buffers stop here."""
