"""ORM tables by subject; those that most packages share are in `storage.database`. May import `storage` only."""
