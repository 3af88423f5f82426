"""Decides which requests run when and in which batches: run queue, run-time model, forecast of returning clients.

Plain values apart from the scheduler's threads. May import no other package of this room; of the SDK only root modules.
"""
