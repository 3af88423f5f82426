"""The `edgectl` command line: parses options, asks, prints and draws. Imports every other room; no room imports it."""
