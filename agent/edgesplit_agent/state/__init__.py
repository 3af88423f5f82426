"""The agent's persistent state: the layout and lock of its data folder, and the activation state of the models'
releases (`slots`: its transitions, `activation_store`: in memory and on disk) and what cascades have learnt, written so
that a power cut leaves the old state or the new one. Imports no other package of the agent, only the SDK's file, error
and serialisation helpers, and the state of its sequential test.
"""
