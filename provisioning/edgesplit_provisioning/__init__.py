"""Provisioning: brings the agent onto machines. Writes system images with the agent to SD cards, prepares Jetson root
file systems, adopts running machines over SSH, builds offline kits, and writes release bundles for devices without a
network. Imports the SDK (`edgesplit`) only; the command line asks, prints and draws progress.
"""
