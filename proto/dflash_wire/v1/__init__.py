"""The public gRPC API: ``generation.proto`` and what protoc makes of it (``make proto``)."""
