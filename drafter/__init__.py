"""The drafter: draft models, their context pool, and how they propose draft tokens."""
