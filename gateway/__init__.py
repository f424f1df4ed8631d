"""The HTTP face of the server and, below it, the coordinator.

Knows requests, text and HTTP; knows no torch and no ray. ``gateway.app.create_app`` is the way in.
"""
