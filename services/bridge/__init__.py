"""The bridge service: the algorithm of `bridge`, its models at the other end of gRPC streams."""
