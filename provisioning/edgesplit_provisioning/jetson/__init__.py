"""Jetson boards: NVIDIA's board support package (`Linux_for_Tegra`) is prepared, and NVIDIA's own flasher does the rest
(docs/decisions/0037). Imports `edgesplit`, and from this room `wifi`.

`bsp` reads the package, `overlay` lists the files to add, `root_filesystem` writes them into its root file system and
nowhere else, `flasher` builds NVIDIA's commands.
"""
