"""Provisioning: brings the agent onto machines. Flashes SD cards and Jetson boards, adopts running machines over ssh,
builds offline kits, and writes release bundles for devices without a network. Imports the SDK (`edgesplit`) and, until
output is moved out of here, `edgesplit_cli.output`.
"""
