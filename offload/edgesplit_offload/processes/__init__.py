"""Several serving processes behind one port: supervisor, messages, questions to all processes, summed metrics.

May import no other package of this room; of the SDK `observability` and root modules.
"""
