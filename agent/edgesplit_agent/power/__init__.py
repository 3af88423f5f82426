"""Power management: sensors, power mode, power budget and energy accounting.

May import the plan, `mqtt` and the errors of the SDK, and no other package of the agent.
"""
