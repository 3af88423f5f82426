"""Adoption (`edgectl adopt`): installs the agent over OpenSSH on machines that already run. Imports `edgesplit`,
and from this room `image` and `kit`.

`inventory` lists the machines, `connection` talks to one, `facts` surveys it, `decide` decides (no I/O), `upload`
copies, `adopt` does it all in order, and `parallel` does it for several machines at once.
"""
