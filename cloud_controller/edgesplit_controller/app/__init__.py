"""Entry point of a controller process: creates, starts and stops the parts, runs several processes, and does periodic
housekeeping. Imports every other package of the controller; none imports this one.
"""
