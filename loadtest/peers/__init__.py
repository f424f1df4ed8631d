"""Our server beside other servers of the same pair: ``make bench-peers``."""
