"""One module per command of `edgectl`: options, the call of the controller or library, and the output; imported on
first use by `lazy_commands`. Imports every other package of the project, and from this room everything but `main`.
"""
