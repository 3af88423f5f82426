"""Jetson boards: NVIDIA's own tree (`Linux_for_Tegra`) is prepared, and NVIDIA's own flasher does the rest.

`tree` looks at the tree, `rootfs` writes into its root file system and nowhere else, `overlay` says what, `flasher`
which commands of NVIDIA's follow, `session` is one call of
`edgectl flash --device jetson-…` (docs/decisions/0037).
"""
