"""From an operating system's image to a card that boots, installs the agent and comes online (docs/decisions/0035).

Nothing is mounted: partition tables are read by `partitions`, FAT by mtools, the root file system by debugfs. What an
image is, is found out before a byte of the card is touched; the card's partition table is written last, so that a card
that was cut off anywhere boots nowhere.
"""
