"""The agent as a service: its unit, what it tells its manager, a manager where there is none, and what ails it."""
