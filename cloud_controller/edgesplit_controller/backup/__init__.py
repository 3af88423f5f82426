"""Backup and restore of a controller: keys, TUF repository, database, blobs in one file, sealed where keys are in it.

`envelope` seals, `rows` exports and imports the database, `making` writes a backup while the controller runs,
`restoring` reads one into an empty place. Nothing but this program is needed for either, whichever the database.
"""
