"""Public client of the controller's HTTP API, for programs that script a fleet; `edgectl` is built on it.

Log in once with `edgectl login FILE`, or run on the machine of the controller, and then:

    from pathlib import Path

    from edgesplit.controller_client.claims import ClaimRequest, create_claim
    from edgesplit.controller_client.client import ControllerClient

    controller = ControllerClient.connect()

    for device in controller.get_all("/v1/devices", label=["site=north"], state="online"):
        print(device["name"], device["group"], device["last_seen"])

    request = ClaimRequest(device="cam-7", device_class="raspberrypi5", labels={"site": "north"})
    claim = create_claim(controller, request)
    Path("cam-7.claim.json").write_text(claim)  # holds a secret: hand it to the device, which enrols with it

`ControllerClient` has the HTTP verbs and pagination, `credentials` the operator's credentials file, `claims` the
enrolment of new devices, `settings` the default paths. All errors are `edgesplit.EdgeError`s. May import `trust` and
the modules at the root of the SDK.
"""
