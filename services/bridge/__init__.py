"""The bridge server: the algorithm of `bridge` between model services at the other end of gRPC streams."""
