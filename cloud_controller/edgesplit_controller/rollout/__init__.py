"""Rollouts: on what terms a release reaches its devices, decided in pure functions (`terms`, `members`, `steps`,
`commands`) and carried out by one loop (`engine`) in transactions with the director."""
