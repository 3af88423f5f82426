"""Device profiles: what a kind of device can do, each figure with its source. YAML in `edgesplit_device_profiles`.

The schema is documented in docs/device-profiles.md. YAML is read by safe_load only.
"""
