"""The kit: a folder of files with FAT-safe names that installs the agent offline (docs/decisions/0036). Imports
`edgesplit` only.
"""

from edgesplit_provisioning.kit.build import build_kit
from edgesplit_provisioning.kit.manifest import Kit, read_kit
from edgesplit_provisioning.kit.target import Target

__all__ = ["Kit", "Target", "build_kit", "read_kit"]
