"""The bridge server: runs the algorithm of the package `bridge` on model services over gRPC streams."""
