"""The dashboard: its built files, and the data of its pages, read only. Imports `controller`, `fleet`, `planning` and
`storage`.
"""
