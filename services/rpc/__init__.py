"""What all gRPC services share. Protocol buffer messages do not leave this layer and the servicers."""
