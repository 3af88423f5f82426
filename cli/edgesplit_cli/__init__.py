"""The `edgectl` command line. Imports every other package of the project. None imports it, except
`edgesplit_provisioning` for `output`, until its printing is moved here.
"""
