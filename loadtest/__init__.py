"""Load and speed measurements of a running server. Talks HTTP only and imports none of our packages."""
