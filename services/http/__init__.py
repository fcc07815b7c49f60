"""The HTTP door of a bridge: OpenAI's protocol and a page, over the same gateway as the gRPC door."""
