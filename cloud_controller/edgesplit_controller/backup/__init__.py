"""Backup and restore of a controller: keys, TUF repository, database and blobs in one file, encrypted if with keys.

`envelope` is the encrypted and signed file format, `origin` decides whose backups are believed, `rows` exports and
imports the database, `create` writes a backup while the controller runs, `restore` reads one into an empty folder. No
other program is needed, for either database. Imports `storage` and `tuf`.
"""
