"""The machine and its operating system: clocks, disk and memory figures, log buffer, service-manager notification and
the preloading of libraries after installation.

May import `mqtt` and `observability` of the SDK, and no other package of the agent (`preload` loads all of its
modules).
"""
