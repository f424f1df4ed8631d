"""Which engine group gets a request: a decision without Ray, which ``services`` puts into Serve's router."""
