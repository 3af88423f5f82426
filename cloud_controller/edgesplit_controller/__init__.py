"""The cloud controller: registry of models and devices, planning, signing, rollout, telemetry, HTTP API and dashboard.

Root modules: `controller` connects the parts and offers every operation as a plain call; `settings`, `caller`, `errors`
and `status` import no package of the controller, `controller` all but `api`, `app` and `dashboard`.
"""
