"""Flashing: from an operating system's image to a card that boots, installs the agent and comes online
(docs/decisions/0035). Imports `edgesplit`, and from this room `flash_options`, `kit`,
`os_release`, `profiles` and `wifi`.

Nothing is mounted: partition tables are parsed by `partition_table`, FAT is read and written by mtools, the root file
system is read by debugfs. The image is examined before a byte of the card is written; the card's partition table is
written last, so that a card that was interrupted at any point does not boot.
"""
