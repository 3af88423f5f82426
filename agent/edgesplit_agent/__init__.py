"""The agent: runs on the device; decides, fetches, verifies, runs, offloads, answers."""
