"""`edgectl adopt`: the agent onto a machine that runs already, over OpenSSH.

`hosts` says which machines, `ssh` talks to one, `survey` asks what is there, `verdict` decides (pure), `carrying`
copies, `adoption` does it all in order, and `crowd` does it with several machines at once.
"""
